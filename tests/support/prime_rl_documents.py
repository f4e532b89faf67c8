"""Settings of Prime-RL that come from us, however they came about."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dockyard.backends.prime_rl.launch import BACKEND
from dockyard.backends.prime_rl.own_file import translate
from dockyard.config import RunConfig
from dockyard.settings.load import load_run_config

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
OLD = ROOT / "tests" / "data" / "prime_rl_old.toml"
FULL = (
    *("--model.name=Qwen/Qwen3-8B", "--tasks.train=tasks", "--tasks.heldout_share=0.2", "--agent.name=terminus-2"),
    *("--trainer.schedule=linear", "--trainer.warmup_steps=5", "--prime_rl.num_infer_gpus=2"),
    *("--prime_rl.options.trainer.loss.kl_tau=0.01", "--prime_rl.options.inference.vllm.max_num_seqs=64"),
    "--prime_rl.options.monitors.wandb.project=harbor",
)


def written(config: RunConfig, folder: Path = Path("/runs/mine")) -> dict[str, Any]:
    """As Prime-RL reads it."""
    return tomllib.loads(BACKEND.plan(config, folder).files["rl.toml"])


def documents() -> dict[str, dict[str, Any]]:
    return {
        "harbor_8b": tomllib.loads((CONFIGS / "harbor_8b.toml").read_text()),
        "harbor_8b_modal": tomllib.loads((CONFIGS / "harbor_8b_modal.toml").read_text()),
        "run_file": written(load_run_config(None, FULL)),
        "translated": translate(tomllib.loads(OLD.read_text())).values,
    }


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; those inside a list have no number."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from leaves(inner, path)
    else:
        yield path, value
