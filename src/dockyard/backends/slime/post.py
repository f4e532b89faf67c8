"""Where SLiME's arguments say that things are: the run's folder, the router in front of the engines, the model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dockyard.backends.slime.classes import adapter_name
from dockyard.errors import UsageError


def run_folder(args: Any) -> Path:
    """The run that `--custom-config-path` names."""
    try:
        return Path(args.dockyard_run)
    except AttributeError:
        hint = "`dockyard backend slime RUN.toml` writes that file and SLiME's arguments"
        raise UsageError("SLiME was started without `--custom-config-path dockyard.yaml`", hint=hint) from None


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
