"""GRPO with SLiME's loss and sample shape, from Python or the command line:

HarborSlimeTrainer(TrainerConfig(model_name="Qwen/Qwen3-8B", n_rollouts=50)).train()
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harbor_core import DATASET, new_run_dir, positive, tasks_settings, train

import dockyard


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The settings of a run, under the names SLiME gives them."""

    model_name: str = "Qwen/Qwen3-Coder-30B-A3B"
    agent: str = "qwen-coder"
    dataset: str = DATASET
    n_rollouts: int = 50
    """Number of tasks. Each is attempted `n_samples_per_prompt` times."""
    n_samples_per_prompt: int = 2
    n_concurrent: int = 4
    environment: str = "docker"
    lr: float = 1e-6
    kl_coef: float = 0.001
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    use_lora: bool = True
    """False trains all weights, and `lora_r` has no effect."""
    lora_r: int = 16
    save_every: int = 10
    output_dir: str | Path = "outputs/harbor_training"

    def settings(self) -> dict[str, Any]:
        """Return the equivalent settings of a run."""
        return {
            "run_dir": new_run_dir(self.output_dir, "run"),
            "model.name": self.model_name,
            "agent.name": self.agent,
            "environment.type": self.environment,
            "rollout.concurrency": self.n_concurrent,
            "grpo.group_size": self.n_samples_per_prompt,
            "grpo.kl_coef": self.kl_coef,
            "grpo.clip_low": self.eps_clip,
            "grpo.clip_high": self.eps_clip_high,
            "trainer.lr": self.lr,
            **({"trainer.lora_r": self.lora_r} if self.use_lora else {"trainer.method": "full"}),
            "trainer.save_every": self.save_every,
            **tasks_settings("swebench", self.dataset, None, self.n_rollouts),
        }


class HarborSlimeTrainer:
    """Attempts the tasks of a dataset and trains the model on the rollouts."""

    def __init__(self, config: TrainerConfig | None = None) -> None:
        self.config = config or TrainerConfig()

    def train(self) -> dict[str, Any]:
        """Train, and return the summary of the run. Works in any thread, also while an event loop is running."""
        return dockyard.train(self.config.settings()).summary or {}


def parser() -> argparse.ArgumentParser:
    """The arguments, with their defaults."""
    defaults = TrainerConfig()
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--model", dest="model_name", default=defaults.model_name)
    add("--agent", default=defaults.agent)
    add("--env", dest="environment", default=defaults.environment)
    add("--dataset", default=defaults.dataset)
    add("--n-rollouts", default=defaults.n_rollouts, type=positive, help="tasks; each is attempted --n-samples times")
    add("--n-samples", dest="n_samples_per_prompt", default=defaults.n_samples_per_prompt, type=positive)
    add("--n-concurrent", default=defaults.n_concurrent, type=positive)
    add("--lr", default=defaults.lr, type=float)
    add("--kl-coef", default=defaults.kl_coef, type=float)
    add("--lora-r", default=defaults.lora_r, type=positive)
    add("--save-every", default=defaults.save_every, type=positive)
    add("--output-dir", default=defaults.output_dir)
    return result


if __name__ == "__main__":
    sys.exit(train(TrainerConfig(**vars(parser().parse_args())).settings()))
