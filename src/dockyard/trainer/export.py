"""Export a trained policy as a folder for vLLM, transformers and the Hub: a whole model, or its adapter alone.

It computes what the policy computed in training. Its README says how it was prompted, and its chat template does the
same wherever that is possible.
"""

import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError, safe_open

from dockyard import __version__
from dockyard.config import ModelConfig, RunConfig
from dockyard.engine.model_dir import find_model, hub_name
from dockyard.engine.weights import load_model, load_weights
from dockyard.errors import DockyardError, UsageError
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.render.template import TokenizerConfig, keeping_thoughts, read_config, template_source
from dockyard.run_dir.durable import refuse_below_file, whole_folder
from dockyard.run_dir.run import Checkpoints, HeldoutScore, RunPaths
from dockyard.settings.load import load_run_config
from dockyard.trainer.checkpoint import number_format

_TRAINED = {
    "lora": "A LoRA adapter was trained over frozen weights.",
    "qlora": "A LoRA adapter was trained over frozen weights of 4 bits (NF4); what it was added to here has all bits.",
    "full": "All weights were trained.",
}
"""How each `trainer.method` trains."""


def model_card(about: Mapping[str, Any], *, merged: bool, on_hub: bool, thinks: bool) -> str:
    """The model card: Markdown, with the metadata that the Hub reads."""
    kind = "A model" if merged else "A LoRA adapter"
    score = about["heldout_reward"]
    reached = f", with a mean reward of {score:.3f} on held-out tasks" if score is not None else ""
    return "\n".join(
        [
            "---",
            *([f"base_model: {about['base_model']}"] if on_hub else []),
            f"library_name: {'transformers' if merged else 'peft'}",
            "pipeline_tag: text-generation",
            "tags: [dockyard, reinforcement-learning]",
            "---",
            "",
            f"{kind} made by Dockyard {about['dockyard']}: `{about['base_model']}` after {about['step']} steps of "
            f"reinforcement learning with the agent `{about['agent']}`{reached}. {_TRAINED[about['method']]}",
            "",
            "## How it was prompted in training",
            "",
            *(f"- {line}" for line in _prompting(about, thinks=thinks)),
            "",
            "`dockyard.json` has the same for programs.",
            "",
            "## Serving it",
            "",
            *_serving(about, merged=merged),
            "",
        ]
    )


def _prompting(about: Mapping[str, Any], *, thinks: bool) -> list[str]:
    lines = [f"Sampled at temperature {about['temperature']:g}, without top-p, top-k or penalties."]
    if about["tool_calls"] == "preamble":
        lines.append(
            "Tools were described in the system text, because the chat template has no place for them; "
            "`dockyard serve` does so too."
        )
    else:
        lines.append(f"Tools and tool calls were written as the chat template does (`{about['tool_calls']}`).")
    if about["chat_template_changed"]:
        lines.append("Thoughts of earlier turns stayed in the prompt. `chat_template.jinja` was changed to keep them.")
    elif thinks and not about["chat_template_keeps_thoughts"]:
        lines.append(
            "Thoughts of earlier turns stayed in the prompt. The chat template leaves them out; "
            "`dockyard serve` keeps them."
        )
    return lines


def _serving(about: Mapping[str, Any], *, merged: bool) -> list[str]:
    if merged:
        return ["    dockyard serve DIR     # prompts as in training", "    vllm serve DIR"]
    base = about["base_model"]
    template = " --chat-template DIR/chat_template.jinja" if about["chat_template_changed"] else ""
    return [
        f"    dockyard serve {base} --adapter DIR     # prompts as in training",
        f"    vllm serve {base} --enable-lora --lora-modules policy=DIR{template}",
    ]


logger = logging.getLogger(__name__)

ABOUT = "dockyard.json"
_TEMPLATE, _TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")  # files of the base model without its weights
_OWN = ("config.json", "*.index.json")  # files that the exported model replaces
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export, and to which folder."""

    run: Path
    output: Path
    step: int | None = None
    """The step of the checkpoint; None for the latest."""
    best: bool = False
    adapter_only: bool = False
    overwrite: bool = False
    base: str | None = None
    """The base model, if it has moved since the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The weights to export: an adapter, or all."""

    path: Path
    step: int
    score: HeldoutScore | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The model that the run started from."""

    name: str
    """Its name on the Hub, or that of its folder."""
    folder: Path
    config: ModelConfig
    dtype: str | None = None
    """The number format to load it in; None for the one it is stored in."""

    def load(self) -> Any:
        if self.dtype is None:
            return load_model(self.folder, self.config, as_stored=True)
        return load_model(self.folder, self.config.model_copy(update={"dtype": self.dtype}))

    def num_bytes(self) -> int:
        """The size of its weights once they are loaded."""
        files = list(self.folder.glob("*.safetensors"))
        if self.dtype is None:
            return sum(file.stat().st_size for file in files)
        return sum(map(_num_weights, files)) * _BYTES[self.dtype]


def export(wanted: ExportRequest) -> Source:
    """Write the folder, completely or not at all, and return what it was made from."""
    if not (settings := RunPaths(wanted.run).config).is_file():
        raise UsageError(f"`{wanted.run}` holds no run", hint="`dockyard train RUN.toml` makes one")
    config = load_run_config(settings, [])
    if wanted.adapter_only and config.trainer.method == "full":
        hint = "without `--adapter-only` the whole model is exported"
        raise UsageError(f"`{wanted.run}` trained all weights (`trainer.method` is `full`): no adapter", hint=hint)
    source = find_best(wanted.run) if wanted.best else find_step(wanted.run, wanted.step)
    check_output(wanted.output, overwrite=wanted.overwrite)
    model = config.model.model_copy(update={"name": wanted.base or config.model.name, "device": "cpu"})
    folder = find_model(model.name, weights=not wanted.adapter_only)
    base = Base(
        name=hub_name(model.name) or folder.name,
        folder=folder,
        config=model,
        dtype=None if wanted.adapter_only else _dtype(wanted.run, config, source),
    )
    if not wanted.adapter_only:
        _check_space(base, wanted.output)
    with whole_folder(wanted.output.absolute()) as draft:
        if wanted.adapter_only:
            for name in _ADAPTER:
                shutil.copy(source.path / name, draft)
        else:
            _write_whole(base, source, draft)
        _describe(base, source, config, draft)
    if config.trainer.method == "qlora" and not wanted.adapter_only:
        logger.warning(
            "the adapter was trained over weights of 4 bits; the merged model has all bits, so it may score otherwise "
            "than the policy did: `dockyard eval --model.name %s` measures it",
            wanted.output,
        )
    return source


def find_step(run: Path, step: int | None) -> Source:
    """The checkpoint of this step, or the latest."""
    found = {checkpoint.step: checkpoint for checkpoint in Checkpoints(RunPaths(run).checkpoints).all()}
    if not found:
        hint = f"`dockyard train --resume {run}` continues it; `trainer.save_every` says how often it saves"
        raise DockyardError(f"`{run}` has no checkpoint yet", hint=hint)
    chosen = found.get(max(found) if step is None else step)
    if chosen is None:
        raise UsageError(f"`{run}` has no checkpoint of step {step}", hint=f"it has those of {_listed(list(found))}")
    return Source(path=chosen.path, step=chosen.step)


def find_best(run: Path) -> Source:
    """The checkpoint with the highest held-out reward."""
    checkpoints = Checkpoints(RunPaths(run).checkpoints)
    score = checkpoints.best()
    if score is None:
        hint = "`--trainer.keep_best true --eval.every 10` keeps it; without `--best` the latest checkpoint is exported"
        raise UsageError(f"`{run}` has kept no best checkpoint", hint=hint)
    return Source(path=checkpoints.best_path, step=score.step, score=score)


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse to replace anything but an export, and an export without `--overwrite`."""
    refuse_below_file(output, hint="choose another `--output`")
    if output.is_file():
        raise UsageError(f"`{output}` is a file, not a folder", hint="choose another `--output`")
    if not output.exists() or not any(output.iterdir()):
        return
    if not (output / ABOUT).is_file():
        raise UsageError(f"`{output}` holds something else than an export", hint="choose another `--output`")
    if not overwrite:
        raise UsageError(f"`{output}` already holds an export", hint="`--overwrite` replaces it")


def _dtype(run: Path, config: RunConfig, source: Source) -> str | None:
    """The number format to load the base in so that trained weights are not rounded; None for the one it is stored in.

    A whole model is taken as it was trained. An adapter is merged in the wider of the base's format and the run's:
    float32, of which there is no wider, or the base's.
    """
    if config.trainer.method == "full":
        return number_format(source.path)
    latest = Checkpoints(RunPaths(run).checkpoints).latest()
    recorded = number_format(source.path) or (latest and number_format(latest.path))  # the best is an adapter only
    set_by_hand = "float32" if (config.model.dtype, config.model.device) == ("auto", "cpu") else config.model.dtype
    return "float32" if (recorded or set_by_hand) == "float32" else None


def _num_weights(file: Path) -> int:
    try:
        with safe_open(file, framework="pt") as weights:
            return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    except SafetensorError:  # loading it reports what is wrong
        return 0


def _check_space(base: Base, output: Path) -> None:
    needed = base.num_bytes()
    parent = next(parent for parent in output.absolute().parents if parent.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise DockyardError(
            f"`{parent}` has {free >> 20} MB free; the whole model needs {needed >> 20} MB",
            hint="choose an `--output` on another disk, or `--adapter-only`",
        )


def _write_whole(base: Base, source: Source, draft: Path) -> None:
    """Write the files of the base model with the trained weights."""
    for file in (file for pattern in _COPIED for file in base.folder.glob(pattern)):
        if not any(file.match(own) for own in _OWN):
            shutil.copy(file, draft)
    whole = base.load()
    try:
        whole = load_weights(whole, source.path)
        if isinstance(whole, PeftModel):
            whole = whole.merge_and_unload(safe_merge=True)
    except Exception as error:  # whatever the readers raise, one of the two folders is wrong
        raise DockyardError(
            f"the weights in `{source.path}` do not go into `{base.folder}`: {str(error).splitlines()[0]}",
            hint="`--step` takes another checkpoint, `--base` the model that the run was trained on",
        ) from error
    own_settings = draft / "generation_config.json"
    kept = own_settings.read_bytes() if own_settings.exists() else None
    whole.save_pretrained(draft)
    if kept is not None:  # `save_pretrained` rewrites it
        own_settings.write_bytes(kept)


def _describe(base: Base, source: Source, config: RunConfig, draft: Path) -> None:
    tokenizer = read_config(base.folder / _TOKENIZER_CONFIG, TokenizerConfig)
    original = template_source(base.folder, tokenizer)
    template = keeping_thoughts(original, tokenizer.special_tokens())
    if template not in (None, original):
        _write_template(template or "", draft)
    renderer = Renderer.load(base.folder, config.model.name)
    rendering = renderer.rendering
    about: dict[str, Any] = {
        "base_model": base.name,
        "method": config.trainer.method,
        "step": source.step,
        "heldout_reward": source.score.reward if source.score else None,
        "agent": config.agent.name,
        "temperature": config.sampling.temperature,
        "thinking_retention": "all",
        "chat_template_keeps_thoughts": template is not None,
        "chat_template_changed": template not in (None, original),
        "renderer": rendering.renderer,
        "tool_calls": rendering.tool_calls,
        "stop_tokens": rendering.stop_tokens,
        "dockyard": __version__,
    }
    (draft / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    merged = not (draft / _ADAPTER[0]).exists()
    on_hub = hub_name(base.config.name) is not None
    (draft / "README.md").write_text(model_card(about, merged=merged, on_hub=on_hub, thinks=renderer.keeps_thoughts))


def _write_template(template: str, draft: Path) -> None:
    """Write the chat template to the one file it is read from, and remove it from the tokenizer's settings."""
    (draft / _TEMPLATE).write_text(template, encoding="utf-8")
    file = draft / _TOKENIZER_CONFIG
    if file.exists():
        settings = json.loads(file.read_text(encoding="utf-8"))
        settings.pop("chat_template", None)
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(steps)))
