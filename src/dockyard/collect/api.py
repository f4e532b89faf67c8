"""Rollouts from Python: `HarborRolloutGenerator(config=HarborConfig(...)).generate(dataset=..., n_tasks=...)`.

It may be called from synchronous code, inside a notebook's running event loop too.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from dockyard import process
from dockyard.collect.harbor_env_vars import hush
from dockyard.collect.open import check_run, find_model_files
from dockyard.collect.rollout import rollout_order
from dockyard.collect.run_order import PreparedRollouts, gather, rollouts_in
from dockyard.config import Config, RunConfig
from dockyard.errors import UsageError
from dockyard.rollout.job import read_job
from dockyard.run_dir.run import Purpose, RunDir
from dockyard.settings.load import read_dotenv
from dockyard.tasks.registry import load_dataset
from dockyard.types import Rollout


def run_to_end[T](main: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns. Ctrl-C cancels it and waits for it to clean up."""
    if threading.current_thread() is threading.main_thread() and not _is_loop_running():
        return process.run(main)
    loop = asyncio.new_event_loop()
    task = loop.create_task(main)
    with ThreadPoolExecutor(1, "dockyard-rollouts") as thread:
        running = thread.submit(_run, loop, task)
        try:
            return running.result()
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(task.cancel)
            raise


def _run[T](loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(_result(task))


async def _result[T](task: asyncio.Task[T]) -> T:
    return await task


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class HarborConfig(Config):
    """Who attempts tasks, where, and how often."""

    model: str = "Qwen/Qwen3-Coder-30B-A3B-Instruct"
    """A model folder, a Hub name, or `smollm2-135m`. Not needed by agents that ask no model, such as `oracle`."""
    agent: str = "qwen-coder"
    """Any Harbor agent (`dockyard agents` lists them), `shell`, or your own `module:Class`."""
    environment: str = "docker"
    """`docker`, `sandbox`, or any other Harbor environment type."""
    n_concurrent: int = Field(default=4, ge=1)
    """Rollouts under way at the same time."""
    n_samples: int = Field(default=1, ge=1)
    """Rollouts per task."""
    base_url: str | None = None
    """Of a server to sample from. None samples in this process, which needs torch."""
    engine: Literal["vllm", "sglang", "openai"] = "openai"
    """What the server at `base_url` is. `openai` is any; where it returns no token ids, rollouts are text."""
    api_key_env: str | None = None
    """The environment variable that holds the server's API key."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Of every model call, whatever the agent asks for."""
    max_new_tokens: int = Field(default=4096, ge=1)
    """Upper limit on the tokens of one model call."""
    agent_timeout_s: float = Field(default=1800, gt=0)
    """Upper limit on the agent's time in one rollout."""
    agent_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the agent's constructor as they are."""
    environment_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor as they are."""
    registry_path: Path | None = None
    """A `registry.json` in which datasets are looked up by name. None asks Harbor's own, over the network."""
    output_dir: Path | None = None
    """The run folder that keeps the rollouts. None makes a new one under `runs`."""
    harbor_cli: bool = False
    """Make each rollout by a `harbor run` command instead of Harbor's Python API."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of everything random."""

    def run_config(self) -> RunConfig:
        """The same as the settings of a run."""
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
        """Attempt the dataset's tasks, or the first of them, `n_samples` times each. Waits until all are done.

        `dataset` is a folder of tasks, or `name@version` in the registry. A rollout without a reward was lost through
        no fault of the policy; its `failure` says how.
        """
        if n_tasks is not None and n_tasks < 1:
            raise UsageError(f"`n_tasks` is {n_tasks}, not a whole number from 1", hint="`None` takes every task")
        hush()
        read_dotenv()
        return run_to_end(self._generate(dataset, n_tasks))

    def generate_from_existing_job(self, path: str | Path) -> list[Rollout]:
        """The rollouts of a job that `harbor run` made. Tokens are there only where the agent kept them."""
        return read_job(Path(path))

    async def _generate(self, dataset: str | Path, n_tasks: int | None) -> list[Rollout]:
        config = self.config.run_config()
        check_run(config)
        tasks = (await load_dataset(dataset, registry=self.config.registry_path))[:n_tasks]
        prepared = PreparedRollouts(model=find_model_files(config))
        purpose = Purpose(verb="rollout", num_tasks=n_tasks, harbor_cli=self.config.harbor_cli)
        with RunDir.create(config.run_dir, config, purpose=purpose) as run:
            order = rollout_order(run, tasks, self.config.n_samples)
            groups = await gather(run, prepared, order, title="rollouts", harbor_cli=self.config.harbor_cli)
        return rollouts_in(groups)
