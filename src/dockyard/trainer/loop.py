"""The training loop: attempt tasks, update the policy, serve the new weights, record the step.

A resumed run takes the same path. Rollouts that were recorded are read instead of made, so updates since the last
checkpoint are replayed exactly.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from dockyard.config import GRPOConfig, RunConfig
from dockyard.engine.protocol import Engine
from dockyard.rl.reward import RewardShaping
from dockyard.rollout.plan import RolloutPlan
from dockyard.run_dir.run import step_phase
from dockyard.tasks.order import due, spare
from dockyard.trainer.display import TrainingProgress
from dockyard.trainer.dynamic_sampling import Collector, collect_signal
from dockyard.types import Group, Rollout, Task


class Rollouts(Protocol):
    """The source of a step's groups."""

    async def collect(self, step: int) -> tuple[Group, ...]: ...


class Learner(Protocol):
    """What the loop updates and publishes: the policy in this process, or a connection to one on another machine."""

    @property
    def version(self) -> int:
        """The number of updates so far."""
        ...

    @property
    def engine(self) -> Engine | None:
        """Samples from the published weights; None if nothing does."""
        ...

    async def update(self, groups: tuple[Group, ...]) -> dict[str, float]:
        """Update the weights once and return the metrics of the update."""
        ...

    async def publish(self) -> None:
        """Serve the present weights to rollouts that start from now on."""
        ...

    async def checkpoint(self) -> None:
        """Save a checkpoint if one is due."""
        ...


class Record(Protocol):
    """Where the results of a step are written."""

    async def record(self, step: int, groups: tuple[Group, ...], metrics: dict[str, float]) -> None: ...


async def train(steps: int, rollouts: Rollouts, learner: Learner, record: Record) -> None:
    """Make four calls a step. New weights are served before the next step's rollouts begin."""
    for step in range(learner.version, steps):
        clock = _Clock()
        groups = await clock.timed("collect", rollouts.collect(step))
        metrics = await clock.timed("update", learner.update(groups))
        await clock.timed("publish", learner.publish())
        await record.record(step, groups, metrics | clock.seconds)


class _Clock:
    """Measures how long the calls of a step take. Rollouts that were started early take less than their own time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    async def timed[T](self, name: str, call: Awaitable[T]) -> T:
        start = time.monotonic()
        result = await call
        self.seconds[f"time/{name}_s"] = time.monotonic() - start
        return result


@dataclass(slots=True, kw_only=True)
class TaskRollouts:
    """Groups from a pool, on the tasks that are due.

    The rollouts of a step start up to `max_staleness` steps early, so that the engine is not idle during an update.
    The weights that sample them are at most that many updates old.
    """

    pool: Collector
    tasks: list[Task]
    config: RunConfig
    progress: TrainingProgress
    choose: Callable[[int], list[Task]] | None = None
    """Returns the tasks of a step. None: each task once per pass, in an order that the seed determines."""
    shaping: RewardShaping | None = None
    """Shapes the rewards of training rollouts. Orders of evaluations, which `gather` makes, do not use it."""
    _begun: dict[int, "_Collection"] = field(default_factory=dict[int, "_Collection"])

    async def collect(self, step: int) -> tuple[Group, ...]:
        last = min(step + self.config.rollout.max_staleness, self.config.steps - 1)
        for early in range(step, last + 1):
            if early not in self._begun:
                self._begun[early] = _Collection(self.pool, self._plan(early), self.config.grpo)
        collection = self._begun.pop(step)
        return await collection.shown(self.progress, f"step {step + 1} of {self.config.steps}")

    async def gather(self, plan: RolloutPlan, title: str) -> tuple[Group, ...]:
        """Make the rollouts of any order, shown under this title."""
        return await _Collection(self.pool, plan, self.config.grpo).shown(self.progress, title)

    async def close(self) -> None:
        """Cancel rollouts that were started early and will not be used."""
        for collection in self._begun.values():
            collection.task.cancel()
        await asyncio.gather(*(collection.task for collection in self._begun.values()), return_exceptions=True)

    def _due(self, step: int) -> list[Task]:
        if self.choose:
            return self.choose(step)
        count, by_pass = self.config.grpo.tasks_per_step, self.config.counts_passes
        return due(self.tasks, step, count, self.config.seed, kind_of=lambda task: task.kind, by_pass=by_pass)

    def _spare(self, step: int, taken: list[Task]) -> list[Task]:
        grpo = self.config.grpo
        count = (grpo.max_tries - 1) * len(taken) if grpo.dynamic_sampling else 0
        return spare(self.tasks, step, count, self.config.seed, kind_of=lambda task: task.kind, taken=taken)

    def _plan(self, step: int) -> RolloutPlan:
        tasks = self._due(step)
        return RolloutPlan(
            phase=step_phase(step),
            tasks=tasks,
            group_size=self.config.grpo.group_size,
            temperature=self.config.sampling.temperature,
            seed=self.config.seed,
            stream=step_phase(step),
            spare=self._spare(step, tasks),
            shape=self.shaping.shape if self.shaping else None,
        )


class _Collection:
    """A plan in progress. Rollouts that finish before it is shown are counted when it is."""

    def __init__(self, pool: Collector, plan: RolloutPlan, grpo: GRPOConfig) -> None:
        self._plan = plan
        self._total = len(plan.tasks) * plan.group_size
        self._finished: list[Rollout] = []
        self._progress: TrainingProgress | None = None
        self.task = asyncio.create_task(collect_signal(pool, plan, grpo, self._finish, self._extend))

    async def shown(self, progress: TrainingProgress, title: str) -> tuple[Group, ...]:
        progress.begin(title, self._total, self._plan.tasks, self._plan.group_size)
        for rollout in self._finished:
            progress.finished(rollout)
        self._progress = progress
        return await self.task

    def _finish(self, rollout: Rollout) -> None:
        if self._progress:
            self._progress.finished(rollout)
        else:
            self._finished.append(rollout)

    def _extend(self, count: int) -> None:
        self._total += count
        if self._progress:
            self._progress.extend(count)
