"""Where SLiME's arguments say that things are: the run's folder, the router in front of the engines, the model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dockyard.backends.slime.classes import adapter_name
from dockyard.config import RunConfig
from dockyard.errors import UsageError
from dockyard.run_dir import settings_file
from dockyard.settings import load_run_config


def run_folder(args: Any) -> Path:
    """The run that `--custom-config-path` names."""
    try:
        return Path(args.dockyard_run)
    except AttributeError:
        hint = "`dockyard backend slime RUN.toml` writes that file and SLiME's arguments"
        raise UsageError("SLiME was started without `--custom-config-path dockyard.yaml`", hint=hint) from None


def run_config(args: Any) -> RunConfig:
    """The settings of that run."""
    return load_run_config(settings_file(run_folder(args)), [])


def check_agreement(args: Any, config: RunConfig) -> None:
    """Refuse arguments that somebody changed by hand: rollouts follow the run's settings, and SLiME would not."""
    for option, told, setting, value in (
        ("--rollout-batch-size", args.rollout_batch_size, "grpo.tasks_per_step", config.grpo.tasks_per_step),
        ("--n-samples-per-prompt", args.n_samples_per_prompt, "grpo.group_size", config.grpo.group_size),
        ("--rollout-temperature", args.rollout_temperature, "sampling.temperature", config.sampling.temperature),
    ):
        if told != value:
            hint = f"change `{setting}` in the run file, and start SLiME by `dockyard backend slime`"
            raise UsageError(f"SLiME was started with `{option} {told}`; the run's `{setting}` is {value}", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Rollouts with the same are made together."""

    run: Path
    router_url: str
    model: str
    """The folder that holds its tokenizer."""
    context_length: int
    num_steps: int
    adapter: str | None = None
    """The LoRA adapter that the engines are to sample from."""

    @classmethod
    def of(cls, args: Any) -> Self:
        """Read from SLiME's arguments, once its router is up."""
        if args.rollout_max_context_len is None:
            hint = "`--engine.context_length N`: the tokens of prompt and answer together"
            raise UsageError("SLiME was started without `--rollout-max-context-len`", hint=hint)
        return cls(
            run=run_folder(args),
            router_url=f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
            model=args.hf_checkpoint,
            context_length=args.rollout_max_context_len,
            num_steps=args.num_rollout,
            adapter=adapter_name(args),
        )
