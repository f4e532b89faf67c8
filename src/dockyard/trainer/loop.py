"""The training loop: attempt tasks, learn from the attempts, serve the new weights; repeat.

A resumed run takes the same path: steps that were recorded are read instead of made, so updates since the last
checkpoint are replayed exactly.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dockyard.config import GRPOConfig, RunConfig
from dockyard.engine.protocol import Engine
from dockyard.errors import DockyardError
from dockyard.rl.statistics import rollout_metrics
from dockyard.rollout.pool import Order, RolloutPool, failure_counts
from dockyard.run_dir.run import RunDir, step_phase
from dockyard.tasks.order import due, spare
from dockyard.trainer.display import TrainingProgress
from dockyard.trainer.dynamic_sampling import collect_signal, group_metrics
from dockyard.types import Group, Rollout, Task

if TYPE_CHECKING:  # it needs torch, which a loop whose policy is on another machine does not
    from dockyard.trainer.policy import Policy


class Rollouts(Protocol):
    """Where groups come from."""

    async def collect(self, step: int) -> tuple[Group, ...]: ...


class Learner(Protocol):
    """What learns from groups, and serves what it learnt."""

    @property
    def version(self) -> int: ...
    async def update(self, groups: tuple[Group, ...]) -> dict[str, float]: ...
    async def publish(self) -> None: ...


class ServedLearner(Learner, Protocol):
    """A learner as a run has it: with what samples from it, and able to save itself."""

    @property
    def engine(self) -> Engine | None:
        """None where nothing takes new weights."""
        ...

    async def checkpoint(self) -> None:
        """Save everything, if it is time."""
        ...


class Record(Protocol):
    """Where steps are written down."""

    async def record(self, step: int, groups: tuple[Group, ...], metrics: dict[str, float]) -> None: ...


async def train(steps: int, rollouts: Rollouts, learner: Learner, record: Record) -> None:
    """Four calls a step. New weights are served before the next step's rollouts begin."""
    for step in range(learner.version, steps):
        clock = _Clock()
        groups = await clock.timed("collect", rollouts.collect(step))
        metrics = await clock.timed("update", learner.update(groups))
        await clock.timed("publish", learner.publish())
        await record.record(step, groups, metrics | clock.seconds)


class _Clock:
    """How long the calls of a step took. Rollouts that were begun early are waited for less than they take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    async def timed[T](self, name: str, call: Awaitable[T]) -> T:
        start = time.monotonic()
        result = await call
        self.seconds[f"time/{name}_s"] = time.monotonic() - start
        return result


@dataclass(slots=True, kw_only=True)
class TaskRollouts:
    """Groups from a pool, on the tasks whose turn it is.

    The rollouts of a step begin up to `max_staleness` steps early, so that the policy is not idle while it learns; the
    weights behind them are at most so many updates old.
    """

    pool: RolloutPool
    tasks: list[Task]
    config: RunConfig
    progress: TrainingProgress
    _begun: dict[int, "_Collection"] = field(default_factory=dict[int, "_Collection"])

    async def collect(self, step: int) -> tuple[Group, ...]:
        last = min(step + self.config.rollout.max_staleness, self.config.steps - 1)
        for early in range(step, last + 1):
            if early not in self._begun:
                self._begun[early] = _Collection(self.pool, self._order(early), self.config.grpo)
        collection = self._begun.pop(step)
        return await collection.shown(self.progress, f"step {step + 1} of {self.config.steps}")

    async def gather(self, order: Order, title: str) -> tuple[Group, ...]:
        """Any order of rollouts, shown under this title."""
        return await _Collection(self.pool, order, self.config.grpo).shown(self.progress, title)

    async def close(self) -> None:
        """Stop what was begun early and will not be used."""
        for collection in self._begun.values():
            collection.task.cancel()
        await asyncio.gather(*(collection.task for collection in self._begun.values()), return_exceptions=True)

    def _due(self, step: int) -> list[Task]:
        count, by_pass = self.config.grpo.tasks_per_step, self.config.counts_passes
        return due(self.tasks, step, count, self.config.seed, kind_of=lambda task: task.kind, by_pass=by_pass)

    def _spare(self, step: int, taken: list[Task]) -> list[Task]:
        grpo = self.config.grpo
        count = (grpo.max_tries - 1) * len(taken) if grpo.dynamic_sampling else 0
        return spare(self.tasks, step, count, self.config.seed, kind_of=lambda task: task.kind, taken=taken)

    def _order(self, step: int) -> Order:
        tasks = self._due(step)
        return Order(
            phase=step_phase(step),
            tasks=tasks,
            group_size=self.config.grpo.group_size,
            temperature=self.config.sampling.temperature,
            seed=self.config.seed,
            stream=step_phase(step),
            spare=self._spare(step, tasks),
        )


class _Collection:
    """An order under way. What happens before it is shown is shown then."""

    def __init__(self, pool: RolloutPool, order: Order, grpo: GRPOConfig) -> None:
        self._order = order
        self._total = len(order.tasks) * order.group_size
        self._finished: list[Rollout] = []
        self._progress: TrainingProgress | None = None
        self.task = asyncio.create_task(collect_signal(pool, order, grpo, self._finish, self._extend))

    async def shown(self, progress: TrainingProgress, title: str) -> tuple[Group, ...]:
        progress.begin(title, self._total, self._order.tasks, self._order.group_size)
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


@dataclass(slots=True, kw_only=True)
class PublishedPolicy:
    """A policy whose every version is served by an engine, if there is one that takes new weights."""

    policy: "Policy"
    engine: Engine | None
    run: RunDir
    config: RunConfig
    # Always the same thread: each new one would keep its own freed memory, gigabytes of it.
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "dockyard-trainer"))

    @property
    def version(self) -> int:
        return self.policy.version

    async def update(self, groups: tuple[Group, ...]) -> dict[str, float]:
        return await self._in_thread(self.policy.update, groups, self.config.steps)

    async def publish(self) -> None:
        # What was served until now stays: a server may read it again for a request that is not over.
        self.run.keep_adapters(self.version - 1 - self.config.rollout.max_staleness)
        folder = await self._in_thread(self.run.publish_adapter, self.version, self.policy.save_weights)
        if self.engine:
            await self.engine.publish(folder, self.version)

    async def checkpoint(self) -> None:
        """Save everything, if it is time."""
        if is_saved(self.config, self.version):
            await self._in_thread(self._save)

    async def _in_thread[**P, T](self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Off the event loop, which goes on serving rollouts."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args, **kwargs))

    def _save(self) -> None:
        with self.run.checkpoints.new(self.version) as folder:
            self.policy.save(folder)
        self.run.checkpoints.keep_last(self.config.trainer.keep_last)


def is_saved(config: RunConfig, version: int) -> bool:
    """Whether a run keeps everything of this version."""
    return version % config.trainer.save_every == 0 or version == config.steps


@dataclass(slots=True)
class StepRecord:
    """Writes a step's numbers to the run, the progress display and trackers, then lets the learner save itself.

    In this order: a checkpoint says that its steps are recorded.
    """

    run: RunDir
    progress: TrainingProgress
    learner: ServedLearner
    evaluate: Callable[[int], Awaitable[dict[str, float]]]
    """The numbers of a held-out evaluation of this version; none if none is due."""
    track: Callable[[int, Mapping[str, float]], None]
    """Tells others a step's numbers."""
    foreign: str | None = None
    """Whose rollouts these are, if not the policy's own."""
    _since: float = 0.0

    def __post_init__(self) -> None:
        self._since = time.monotonic()

    async def record(self, step: int, groups: tuple[Group, ...], metrics: dict[str, float]) -> None:
        seconds = time.monotonic() - self._since
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        grpo = self.run.config.grpo
        numbers = rollout_metrics(rollouts) | group_metrics(groups, grpo) | metrics | {"time/step_s": seconds}
        numbers["rollout/staleness"] = float(step) if self.foreign else staleness(rollouts, step)
        numbers["rollout/tokens_per_s"] = numbers["rollout/sampled_tokens"] / max(seconds, 1e-9)
        numbers |= await self.evaluate(step + 1)
        self._since = time.monotonic()  # an evaluation is no part of the next step
        self.run.record_metrics(step, numbers)
        self.track(step, numbers)
        self.progress.step(step, numbers, failure_counts(rollouts))
        if self.foreign and "train/mean_logprob" in numbers:
            self.progress.say(
                f"step {step + 1}: off-policy by {step} updates: {self.foreign}; "
                f"mean logprob of their tokens under the policy {numbers['train/mean_logprob']:.2f}"
            )
        if numbers.get("train/skipped"):
            _stop_if_stuck(self.run)
        await self.learner.checkpoint()


def _stop_if_stuck(run: RunDir) -> None:
    """An error when so many of the latest updates in a row were skipped that the next will hardly go better."""
    skipped = [line["train/skipped"] for line in run.read_metrics() if "train/skipped" in line]
    limit = run.config.trainer.max_skipped_steps
    if len(skipped) >= limit and all(skipped[-limit:]):
        raise DockyardError(
            f"the gradients of the last {limit} updates were not finite: the policy is not learning",
            hint="begin another run with a lower `--trainer.lr` or `--model.dtype float32`; "
            "`--trainer.max_skipped_steps` sets how many may be skipped",
        )


def staleness(rollouts: list[Rollout], version: int) -> float:
    """How many updates old the weights behind a sampled token were, on average, when `version` learnt from it."""
    segments = [segment for rollout in rollouts for segment in rollout.segments if segment.versions is not None]
    ages = [version - segment.versions[segment.sampled] for segment in segments if segment.versions is not None]
    return float(np.concatenate(ages).mean()) if ages and sum(map(len, ages)) else 0.0
