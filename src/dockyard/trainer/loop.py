"""The training loop: attempt tasks, learn from the attempts, serve the new weights; repeat.

A resumed run takes the same path: steps that were recorded are read instead of made, so updates since the last
checkpoint are replayed exactly.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Protocol

from dockyard.config import RunConfig
from dockyard.engine import Engine
from dockyard.rollout.pool import Order, Pool, failure_counts
from dockyard.rollout.statistics import gateway_metrics
from dockyard.run_dir import RunDir, step_phase
from dockyard.tasks import tasks_of_step
from dockyard.trainer.policy import Policy
from dockyard.trainer.progress import Progress
from dockyard.types import Group, Rollout, Task


class Rollouts(Protocol):
    """Where groups come from."""

    async def collect(self, step: int) -> tuple[Group, ...]: ...


class Learner(Protocol):
    """What learns from groups, and serves what it learnt."""

    @property
    def version(self) -> int: ...
    async def update(self, groups: tuple[Group, ...]) -> dict[str, float]: ...
    async def publish(self) -> None: ...


class Record(Protocol):
    """Where steps are written down."""

    async def record(self, step: int, groups: tuple[Group, ...], metrics: dict[str, float]) -> None: ...


async def train(steps: int, rollouts: Rollouts, learner: Learner, record: Record) -> None:
    """Four calls a step. New weights are served before the next step's rollouts begin."""
    for step in range(learner.version, steps):
        groups = await rollouts.collect(step)
        metrics = await learner.update(groups)
        await learner.publish()
        await record.record(step, groups, metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRollouts:
    """Groups from a pool, on the tasks whose turn it is."""

    pool: Pool
    tasks: list[Task]
    config: RunConfig
    progress: Progress

    async def collect(self, step: int) -> tuple[Group, ...]:
        tasks = tasks_of_step(self.tasks, step, self.config.grpo.tasks_per_step, self.config.seed)
        order = Order(
            phase=step_phase(step),
            tasks=tasks,
            group_size=self.config.grpo.group_size,
            temperature=self.config.sampling.temperature,
            seed=self.config.seed,
            stream=step_phase(step),
        )
        return await self.gather(order, f"step {step + 1} of {self.config.steps}")

    async def gather(self, order: Order, title: str) -> tuple[Group, ...]:
        """Any order of rollouts, shown under this title."""
        self.progress.begin(title, len(order.tasks) * order.group_size)
        return await self.pool.collect(order, self.progress.finished)


@dataclass(slots=True, kw_only=True)
class PublishedPolicy:
    """A policy whose every version is served by an engine."""

    policy: Policy
    engine: Engine
    run: RunDir
    config: RunConfig
    # Always the same thread: each new one would keep its own freed memory, gigabytes of it.
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "dockyard-trainer"))

    @property
    def version(self) -> int:
        return self.policy.version

    async def update(self, groups: tuple[Group, ...]) -> dict[str, float]:
        start = time.monotonic()
        metrics = await self._in_thread(self.policy.update, groups, self.config.steps)
        return metrics | {"time/update_s": time.monotonic() - start}

    async def publish(self) -> None:
        # What was served until now stays: a server may read it again for a request that is not over.
        self.run.keep_adapters(self.version - 1)
        folder = await self._in_thread(self.run.publish_adapter, self.version, self.policy.save_adapter)
        await self.engine.publish(folder, self.version)

    async def checkpoint(self) -> None:
        """Save everything, if it is time."""
        if self.version % self.config.trainer.save_every == 0 or self.version == self.config.steps:
            await self._in_thread(self._save)

    async def _in_thread[**P, T](self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Off the event loop, which goes on serving rollouts."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args, **kwargs))

    def _save(self) -> None:
        with self.run.new_checkpoint(self.version) as folder:
            self.policy.save(folder)


@dataclass(slots=True)
class StepRecord:
    """Writes a step's numbers to the run and to the progress display, then lets the learner save itself.

    In this order: a checkpoint says that its steps are recorded.
    """

    run: RunDir
    progress: Progress
    learner: PublishedPolicy
    _since: float = 0.0

    def __post_init__(self) -> None:
        self._since = time.monotonic()

    async def record(self, step: int, groups: tuple[Group, ...], metrics: dict[str, float]) -> None:
        seconds, self._since = time.monotonic() - self._since, time.monotonic()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        numbers = rollout_metrics(rollouts) | metrics | {"time/step_s": seconds}
        numbers["rollout/tokens_per_s"] = numbers["rollout/sampled_tokens"] / max(seconds, 1e-9)
        self.run.record_metrics(step, numbers)
        self.progress.step(step, numbers, failure_counts(rollouts))
        await self.learner.checkpoint()


def rollout_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """A step's rollouts in numbers."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return {
        "reward/mean": fmean(rewards) if rewards else float("nan"),
        "rollout/count": float(len(rollouts)),
        "rollout/lost": float(len(rollouts) - len(rewards)),
        "rollout/segments": fmean(len(rollout.segments) for rollout in rollouts),
        "rollout/sampled_tokens": float(sum(rollout.num_sampled for rollout in rollouts)),
        **gateway_metrics(rollouts),
        **{f"failure/{cause}": float(count) for cause, count in failure_counts(rollouts).items()},
    }
