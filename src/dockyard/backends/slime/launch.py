"""Launch a run on SLiME: model shape, GPU layout, arguments and script become one `BackendLaunch`.

Errors name what this machine lacks and the command that fixes it. Notes say how the run differs from `dockyard train`.
"""

import json
import os
import subprocess
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

from dockyard.backends.launch import BackendLaunch, Support
from dockyard.backends.slime.arguments import CUSTOM_CONFIG, arguments, check_more, is_evaluated
from dockyard.backends.slime.layout import Layout, ParallelSplit, lay_out, read_shape, shape_arguments, usual_split
from dockyard.backends.slime.script import HELD, Script, custom_config
from dockyard.backends.slime.setting_support import support
from dockyard.cache import cache_dir
from dockyard.config import RunConfig
from dockyard.engine.model_dir import known_as
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.paths import RunPaths

_CLONE = {"slime": "https://github.com/THUDM/slime", "miles": "https://github.com/radixark/miles"}
_PROBE = """
import importlib.util, json
wanted = ["torch", "ray", "sglang", "megatron", "dockyard"]
missing = [name for name in wanted if importlib.util.find_spec(name) is None]
gpus = 0 if "torch" in missing else __import__("torch").cuda.device_count()
print(json.dumps({"missing": missing, "gpus": gpus}))
"""


def check_machine(config: RunConfig) -> None:
    """Raise an error if programs or GPUs are missing. SLiME would wait for GPUs forever."""
    checkout = checkout_of(config)
    _check_folders(config, checkout)
    found = _probe(config, checkout)
    if found["missing"]:
        names = ", ".join(f"`{name}`" for name in found["missing"])
        hint = "run `pip install dockyard` in SLiME's image (`slimerl/slime:latest`), or set `--slime.python`"
        raise DockyardError(f"`{config.slime.python}` has no {names}", hint=hint)
    needed, there = config.slime.num_gpus, found["gpus"]
    if needed > config.slime.gpus_per_node:
        if not os.environ.get("RAY_ADDRESS"):
            hint = "`ray start` on each machine, then `export RAY_ADDRESS=HEAD:6379`"
            raise DockyardError(f"{needed} GPUs need several machines, and RAY_ADDRESS is not set", hint=hint)
    elif there < needed:
        hint = f"`--slime.num_gpus {there}`" if there else "`--write` only writes the files, to start the run elsewhere"
        raise DockyardError(f"`slime.num_gpus` is {needed}, and this machine has {there} GPUs", hint=hint)


def checkout_of(config: RunConfig) -> Path:
    """Return SLiME's checkout, which has no default."""
    if config.slime.checkout is None:
        hint = f"`git clone {_CLONE[config.slime.flavour]}`, then `--slime.checkout DIR`"
        raise UsageError("`slime.checkout` is not set", hint=hint)
    return config.slime.checkout.absolute()


def _check_folders(config: RunConfig, checkout: Path) -> None:
    slime = config.slime
    for option, folder, inside in (
        ("checkout", checkout, f"{slime.flavour}/utils/arguments.py"),
        ("checkout", checkout, "train.py"),
        ("megatron", slime.megatron, "megatron"),
    ):
        if not (folder / inside).exists():
            clone = _CLONE[slime.flavour] if option == "checkout" else "https://github.com/NVIDIA/Megatron-LM"
            hint = f"`git clone {clone}`, then `--slime.{option} DIR`"
            raise DockyardError(f"`slime.{option}` is `{folder}`, which has no `{inside}`", hint=hint)


def _probe(config: RunConfig, checkout: Path) -> dict[str, Any]:
    """Return the missing packages and the number of GPUs of the Python that runs SLiME."""
    slime = config.slime
    paths = (str(checkout), str(slime.megatron.absolute()), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": ":".join(path for path in paths if path)}
    try:
        done = subprocess.run(
            [slime.python, "-c", _PROBE], capture_output=True, text=True, env=environment, timeout=300
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, IndexError, ValueError, subprocess.TimeoutExpired) as error:
        message = f"`slime.python` is `{slime.python}`, which does not run: {error}"
        raise DockyardError(message, hint="set it to the Python of SLiME's environment") from None


def notes(config: RunConfig, layout: Layout, split: ParallelSplit) -> list[str]:
    """Return notes for the user, one per line."""
    grpo, what = config.grpo, "LoRA adapters" if config.slime.flavour == "miles" else "all weights"
    lines = [
        f"{config.slime.flavour} trains {what} of {config.model.name} ({split.num_params_b:.1f} billion) on "
        f"{config.slime.num_gpus} GPUs: {layout}",
        f"each step: {grpo.tasks_per_step} tasks × {grpo.group_size} rollouts, one update; contexts up to "
        f"{config.engine.context_length} tokens, each above {config.trainer.micro_batch_tokens * layout.context} "
        "in its own forward pass",
        f"KL penalty {grpo.kl_coef:g} (low_var_kl, in the loss) against the base model"
        if grpo.kl_coef
        else "no KL penalty",
        "recorded logprobs are not used, because a file may have none: the ratio is 1 and clipping has no effect"
        if config.tasks.source == "recorded"
        else "clipping uses the ratio to the probabilities recorded while sampling",
        "lost rollouts scale a step's gradient by the share of rollouts that remain",
    ]
    if config.tasks.passes and config.slime.dynamic_sampling:
        lines.append(
            "SLiME's own loop ignores passes: it runs a fixed number of steps, and the last may start another pass"
        )
    if layout.offload:
        lines.append("the optimizer state does not fit on the GPUs and is offloaded to host memory")
    if config.trainer.warmup_steps and config.trainer.schedule == "linear":
        lines.append("the learning rate decays from the end of the warm-up, not from the first step")
    if is_evaluated(config) and config.rollout.max_staleness:
        lines.append(
            "held-out tasks are evaluated after the last step only: asynchronous training has no evaluation before it"
        )
    return lines


_SCRIPT = "train.sh"
_PLACE = "{rollout_id}"
_LARGE_B = 16.0
"""Models with more billions of weights than this are converted by all GPUs of a machine."""


class _Slime:
    """Implements `Backend`."""

    name = "slime"

    def support(self, key: str, config: RunConfig) -> Support:
        return support(key, config)

    def check(self, config: RunConfig) -> None:
        check_machine(config)

    def plan(self, config: RunConfig, folder: Path) -> BackendLaunch:
        slime = config.slime
        _refuse_contradictions(config)
        config = _with_recorded(config)
        shape = read_shape(config.model.name)
        model_arguments = shape_arguments(shape)
        layout = lay_out(config, split := usual_split(shape))
        config = _with_context(config, shape["max_position_embeddings"])
        paths = RunPaths(folder)
        ours = arguments(config, layout, paths)
        check_more(slime.args, ours | model_arguments)
        script = Script(
            slime=slime,
            checkout=checkout_of(config),
            model=str(_local(config)) if _local(config).is_dir() else config.model.name,
            shape=model_arguments,
            arguments=ours,
            paths=paths,
            converted=_converted(config),
            num_converting=min(slime.num_gpus, slime.gpus_per_node) if split.num_params_b > _LARGE_B else 1,
            is_async=config.rollout.max_staleness > 0,
            num_nodes=layout.nodes,
        )
        return BackendLaunch(
            command=("bash", str(paths.backend / _SCRIPT)),
            files={_SCRIPT: script.text(), CUSTOM_CONFIG: custom_config(folder)},
            environment={HELD: "1"},
            notes=tuple(notes(config, layout, split)),
        )


BACKEND = _Slime()


def _converted(config: RunConfig) -> Path | None:
    if config.slime.flavour == "miles":
        return None  # its bridge reads the model's folder directly
    if config.slime.converted:
        return config.slime.converted.absolute()
    folder = _local(config)
    name = Path(known_as(config.model.name)).name
    if folder.is_dir():  # other folders may have the same name
        name += f"-{blake2b(bytes(folder), digest_size=4).hexdigest()}"
    return cache_dir().absolute() / "slime" / name


def _local(config: RunConfig) -> Path:
    """Return the absolute path of a local model. The script may be run from any folder."""
    return Path(config.model.name).expanduser().absolute()


def _refuse_contradictions(config: RunConfig) -> None:
    slime, staleness = config.slime, config.rollout.max_staleness
    rules = (
        (
            slime.dynamic_sampling and staleness > 1,
            f"`slime.dynamic_sampling` uses SLiME's loop, which does not support `rollout.max_staleness` {staleness}",
            "`--rollout.max_staleness 1`",
        ),
        (
            slime.flavour == "miles" and slime.pipeline_parallel > 1 and bool(staleness or slime.rollout_gpus),
            f"Miles sends adapters to separate engines only with `pipeline_parallel` 1, not {slime.pipeline_parallel}",
            "`--slime.pipeline_parallel 1`",
        ),
        (
            slime.dynamic_sampling and slime.flavour == "miles",
            "`slime.dynamic_sampling` does not work with Miles, whose loop would look for other groups forever",
            "`--slime.dynamic_sampling false`",
        ),
        (
            slime.dynamic_sampling and config.tasks.source == "recorded",
            "`slime.dynamic_sampling` has no effect: `tasks.source` is `recorded`",
            "`--slime.dynamic_sampling false`",
        ),
    )
    for broken, problem, hint in rules:
        if broken:
            raise UsageError(problem, hint=hint)


def _with_recorded(config: RunConfig) -> RunConfig:
    """Set the steps of a run on recorded samples: one file per step, or one file for all passes."""
    if config.tasks.source != "recorded":
        return config
    dataset = str(Path(config.tasks.dataset or "").absolute())
    if not dataset.endswith(".pt"):
        hint = "`dockyard convert JOB --output FILE.pt` writes one; `dockyard train` reads other formats"
        raise UsageError(f"`tasks.dataset` is `{dataset}`; SLiME reads recorded samples from `.pt` files", hint=hint)
    if _PLACE in dataset:
        steps = next(step for step in count() if not Path(dataset.replace(_PLACE, str(step))).exists())
    else:
        steps = (config.tasks.passes or 1) if Path(dataset).exists() else 0
    if not steps:
        hint = f"`{_PLACE}` in its name stands for the step, from 0; `--slime.save_rollouts true` writes such files"
        raise UsageError(f"`tasks.dataset` is `{dataset}`, which does not exist", hint=hint)
    tasks = config.tasks.model_copy(update={"dataset": dataset})
    return config.model_copy(update={"tasks": tasks, "steps": steps})


def _with_context(config: RunConfig, most: int) -> RunConfig:
    """Use the model's context length if the run sets none."""
    engine = config.engine
    if engine.context_length and engine.context_length > most:
        hint = f"`--engine.context_length {most}`"
        raise UsageError(f"`engine.context_length` is {engine.context_length}; the model's limit is {most}", hint=hint)
    return config.model_copy(
        update={"engine": engine.model_copy(update={"context_length": engine.context_length or most})}
    )
