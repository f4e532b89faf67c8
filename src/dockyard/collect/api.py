"""Rollouts from Python: `HarborRolloutGenerator(config=HarborConfig(...)).generate(dataset=..., n_tasks=...)`.

The calls are synchronous and work in any thread, also while an event loop is running, as in a notebook.
"""

from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from dockyard import process
from dockyard.collect.harbor_env_vars import harbor_environment
from dockyard.collect.open import check_run, find_model_files
from dockyard.collect.run_plan import PreparedRollouts, gather, plan_of, rollouts_in
from dockyard.config import Config, RunConfig
from dockyard.errors import UsageError
from dockyard.rollout.job import read_job
from dockyard.run_dir.run import ROLLOUTS, Purpose, RunDir
from dockyard.tasks.registry import load_dataset
from dockyard.types import Rollout


class HarborConfig(Config):
    """The model, agent and environment of a `HarborRolloutGenerator`."""

    model: str = "Qwen/Qwen3-Coder-30B-A3B-Instruct"
    """A model folder, a Hub name, or `smollm2-135m`. Agents that call no model, such as `oracle`, do not load it."""
    agent: str = "qwen-coder"
    """Any Harbor agent (`dockyard agents` lists them), `shell`, or your own `module:Class`."""
    environment: str = "docker"
    """`docker`, `sandbox`, or any other Harbor environment type."""
    n_concurrent: int = Field(default=4, ge=1)
    """Number of concurrent rollouts."""
    n_samples: int = Field(default=1, ge=1)
    """Rollouts per task."""
    base_url: str | None = None
    """Base URL of an inference server. None samples in this process, which needs torch."""
    engine: Literal["vllm", "sglang", "openai"] = "openai"
    """Type of the server at `base_url`. `openai` is any compatible server; without token ids, rollouts are text."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the server's API key."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature of every model call. Overrides the agent's own."""
    max_new_tokens: int = Field(default=4096, ge=1)
    """Maximum number of tokens per model call."""
    agent_timeout_s: float = Field(default=1800, gt=0)
    """Time limit of the agent in one rollout, in seconds."""
    agent_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the agent's constructor."""
    environment_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    registry_path: Path | None = None
    """A `registry.json` in which datasets are looked up by name. None uses Harbor's registry, over the network."""
    output_dir: Path | None = None
    """The run folder for the rollouts. None creates a new one under `runs`."""
    harbor_cli: bool = False
    """Make each rollout with a `harbor run` command instead of Harbor's Python API."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Random seed."""

    def run_config(self) -> RunConfig:
        """Return the equivalent settings of a run."""
        server = {"type": self.engine, "url": self.base_url, "api_key_env": self.api_key_env} if self.base_url else {}
        return RunConfig.model_validate(
            {
                "run_dir": self.output_dir or Path("runs") / f"rollouts-{datetime.now():%Y%m%d-%H%M%S-%f}",
                "seed": self.seed,
                "model": {"name": self.model},
                "agent": {"name": self.agent, "kwargs": self.agent_kwargs},
                "environment": {"type": self.environment, "kwargs": self.environment_kwargs},
                "engine": server,
                "sampling": {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens},
                "rollout": {"concurrency": self.n_concurrent, "agent_timeout_s": self.agent_timeout_s},
            }
        )


class HarborRolloutGenerator:
    """Makes rollouts through the gateway, or reads those of a finished Harbor job."""

    def __init__(self, config: HarborConfig | None = None) -> None:
        self.config = config or HarborConfig()

    def generate(self, dataset: str | Path, n_tasks: int | None = None) -> list[Rollout]:
        """Attempt the tasks of a dataset `n_samples` times each, and return the rollouts when all are finished.

        `dataset` is a folder of tasks, or `name@version` in the registry. `n_tasks` limits the tasks to the first ones.
        A rollout whose reward is None was lost to an infrastructure failure, which its `failure` describes.
        """
        if n_tasks is not None and n_tasks < 1:
            raise UsageError(f"`n_tasks` is {n_tasks}; it must be at least 1", hint="`None` takes every task")
        with harbor_environment():
            return process.blocking(lambda: process.run(self._generate(dataset, n_tasks)))

    def generate_from_existing_job(self, path: str | Path) -> list[Rollout]:
        """Return the rollouts of a finished `harbor run` job. They have tokens only if the agent recorded them."""
        return read_job(Path(path))

    async def _generate(self, dataset: str | Path, n_tasks: int | None) -> list[Rollout]:
        config = self.config.run_config()
        check_run(config)
        tasks = (await load_dataset(dataset, registry=self.config.registry_path))[:n_tasks]
        prepared = PreparedRollouts(model=find_model_files(config))
        purpose = Purpose(verb="rollout", num_tasks=n_tasks, harbor_cli=self.config.harbor_cli)
        with RunDir.create(config.run_dir, config, purpose=purpose) as run:
            plan = plan_of(config, ROLLOUTS, tasks, self.config.n_samples)
            groups = await gather(run, prepared, plan, title="rollouts", harbor_cli=self.config.harbor_cli)
        return rollouts_in(groups)
