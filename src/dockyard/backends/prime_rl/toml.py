"""Translate a run's settings into Prime-RL's. Keys that no setting of the run decides keep Prime-RL's defaults."""

# pyright: reportMissingTypeStubs=false

from pathlib import Path
from typing import Any, cast

from dockyard.backends.prime_rl.setting_support import setting_of
from dockyard.collect.harbor_env_vars import QUIET
from dockyard.config import RunConfig, TrainerConfig
from dockyard.errors import UsageError

type Table = dict[str, Any]

PLUGIN = "harbor_env"
"""The module that verifiers imports."""
RUN = "prime-rl"
"""Prime-RL's own folder inside the backend's folder."""
CONTEXT_LENGTH = 32768
"""Used when the run sets none. Prime-RL's default is 2048, and it truncates longer sequences."""


def rl_settings(config: RunConfig, folder: Path, outputs: Path) -> Table:
    """Return the settings for a run in `folder` whose checkpoints and logs are written to `outputs`."""
    values: Table = {
        "max_steps": config.steps,
        "seq_len": config.engine.context_length or CONTEXT_LENGTH,
        "output_dir": str(outputs),
        "run": {"name": folder.name, "dir": RUN},
        "env_vars": QUIET,
        "model": {"name": config.model.name},
        "deployment": {
            "num_train_gpus": config.prime_rl.num_train_gpus,
            "num_infer_gpus": config.prime_rl.num_infer_gpus,
        },
        "ckpt": {"interval": config.trainer.save_every},
        "monitors": {"file": {}},
        "trainer": _trainer(config.trainer, config.steps),
        "orchestrator": _orchestrator(config, folder),
        "inference": {
            "vllm": {
                "max_model_len": config.engine.context_length or CONTEXT_LENGTH,
                "tensor_parallel_size": config.prime_rl.tensor_parallel,
                "seed": config.seed,
            }
        },
    }
    return _with_options(values, config.prime_rl.options, ())


def _trainer(config: TrainerConfig, steps: int) -> Table:
    return {
        "model": {"lora": {"rank": config.lora_r, "alpha": config.lora_alpha}},
        "optim": {
            "type": "adamw",
            "lr": config.lr,
            "betas2": config.adam_beta2,
            "weight_decay": config.weight_decay,
            "max_norm": config.max_grad_norm,
        },
        "scheduler": _scheduler(config, steps),
    }


def _scheduler(config: TrainerConfig, steps: int) -> Table:
    warmup = min(config.warmup_steps, steps)
    decay = steps - warmup if config.schedule == "linear" else 0
    return {"type": "linear", "warmup_steps": warmup, "decay_steps": decay} if warmup or decay else {"type": "constant"}


def _orchestrator(config: RunConfig, folder: Path) -> Table:
    grpo = config.grpo
    return {
        "batch_size": grpo.tasks_per_step * grpo.group_size,
        "group_size": grpo.group_size,
        "max_off_policy_steps": config.rollout.max_staleness,
        "concurrency": {"max_inflight": config.rollout.concurrency},
        "renderer": {**_renderer(config), "thinking_retention": "all"},
        "train": {
            "sampling": {
                "temperature": config.sampling.temperature,
                "max_completion_tokens": config.sampling.max_new_tokens,
            },
            "source": [_source(config, folder, "train")],
        },
        **({"eval": _evaluation(config, folder)} if config.tasks.holds_out else {}),
    }


def _evaluation(config: RunConfig, folder: Path) -> Table:
    """Evaluate before the first step and at the last one, as `dockyard train` does."""
    return {
        "interval": config.eval.every or config.steps,
        "group_size": config.eval.samples,
        "sampling": {
            "temperature": config.sampling.eval_temperature,
            "max_completion_tokens": config.sampling.max_new_tokens,
        },
        "source": [_source(config, folder, "heldout")],
    }


def _source(config: RunConfig, folder: Path, split: str) -> Table:
    """The plug-in reads everything else, such as the agent and its environment, from the run's folder."""
    return {
        "name": split,
        "serve": {"pool": {"type": "static", "num_workers": config.prime_rl.num_workers}},
        "env": {
            "taskset": {"id": PLUGIN, "run_dir": str(folder), "split": split},
            "agent": {
                "harness": {"id": PLUGIN, "run_dir": str(folder)},
                "runtime": {"type": "subprocess"},
                "retries": {"max_retries": config.rollout.retries},
            },
        },
    }


def _renderer(config: RunConfig) -> Table:
    from renderers.base import MODEL_RENDERER_MAP  # imports the OpenAI client

    if "name" in config.prime_rl.renderer:
        return config.prime_rl.renderer
    model = config.model.name
    if model not in MODEL_RENDERER_MAP:
        raise UsageError(
            f"Prime-RL has no renderer for `model.name` = `{model}`",
            hint="for a fine-tuned Qwen3 use `--prime_rl.renderer.name qwen3`; to use the model's chat template, with "
            'tool calls as in Qwen3, `--prime_rl.renderer \'{name = "default", tool_parser = "qwen3"}\'`',
        )
    return {"name": MODEL_RENDERER_MAP[model]}


def _with_options(values: Table, options: Table, path: tuple[str, ...]) -> Table:
    """Merge the options that the user sets for Prime-RL only. They may not set keys that the run's settings decide."""
    merged = dict(values)
    for name, value in options.items():
        place = (*path, name)
        if name not in values:
            merged[name] = value
        elif isinstance(values[name], dict) and isinstance(value, dict):
            merged[name] = _with_options(values[name], cast(Table, value), place)
        else:
            raise _already_set(".".join(place), values[name])
    return merged


def _already_set(key: str, value: Any) -> UsageError:
    ours = setting_of(key)
    hint = f"set `{ours}` instead" if ours else "remove it"
    return UsageError(f"`prime_rl.options.{key}` is already set to `{value}` by another setting of the run", hint=hint)
