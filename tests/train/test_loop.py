import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from dockyard.config import RolloutConfig, RunConfig
from dockyard.rollout.plan import RolloutPlan
from dockyard.rollout.pool import RolloutPool
from dockyard.trainer.display import TrainingProgress
from dockyard.trainer.loop import TaskRollouts, train
from dockyard.trainer.record import staleness
from dockyard.types import Group, Rollout, Segment, Task


@dataclass
class Fake:
    """All three parts of the loop; writes down what it was asked."""

    version: int = 0
    events: list[str] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    async def collect(self, step: int) -> tuple[Group, ...]:
        self.events.append(f"collect {step} with weights {self.version}")
        return ()

    engine = None

    async def checkpoint(self) -> None: ...

    async def update(self, groups: tuple[Group, ...]) -> dict[str, float]:
        await asyncio.sleep(0)  # as when it learns in a thread
        self.version += 1
        self.events.append("update")
        return {}

    async def publish(self) -> None:
        self.events.append(f"publish {self.version}")

    async def record(self, step: int, groups: tuple[Group, ...], metrics: dict[str, float]) -> None:
        self.events.append(f"record {step}")
        self.metrics.append(metrics)


def test_new_weights_are_served_before_the_next_rollouts():
    fake = Fake()
    asyncio.run(train(2, fake, fake, fake))
    assert fake.events == [
        *("collect 0 with weights 0", "update", "publish 1", "record 0"),
        *("collect 1 with weights 1", "update", "publish 2", "record 1"),
    ]


def test_a_step_records_how_long_each_of_its_parts_took():
    @dataclass
    class Slow(Fake):
        async def publish(self) -> None:
            await asyncio.sleep(0.05)

    slow = Slow()
    asyncio.run(train(1, slow, slow, slow))
    [seconds] = slow.metrics
    assert seconds.keys() == {"time/collect_s", "time/update_s", "time/publish_s"}
    assert seconds["time/publish_s"] >= 0.05


def test_a_resumed_loop_begins_at_the_version_of_its_weights():
    fake = Fake(version=2)
    asyncio.run(train(3, fake, fake, fake))
    assert fake.events[0] == "collect 2 with weights 2"
    assert fake.version == 3


@dataclass
class FakePool:
    """Notes under which weights the rollouts of a step begin. They take until they are let go."""

    learner: Fake
    begun: dict[str, int] = field(default_factory=dict)

    async def collect(self, plan: RolloutPlan, on_finish: Callable[[Rollout], None]) -> tuple[Group, ...]:
        self.begun[plan.phase] = self.learner.version
        await asyncio.sleep(0.01)
        return ()


def rollouts_of(pool: FakePool, steps: int, max_staleness: int) -> TaskRollouts:
    config = RunConfig(steps=steps, rollout=RolloutConfig(max_staleness=max_staleness))
    tasks = [Task(name="t", path=Path("t"), kind="")]
    return TaskRollouts(pool=cast(RolloutPool, pool), tasks=tasks, config=config, progress=TrainingProgress(steps))


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
async def test_rollouts_begin_early_by_as_many_updates_as_they_may_be_old_and_no_more(max_staleness: int):
    fake = Fake()
    pool = FakePool(fake)
    rollouts = rollouts_of(pool, 5, max_staleness)
    await train(5, rollouts, fake, fake)
    await rollouts.close()
    assert pool.begun == {f"step-{step:05}": max(0, step - max_staleness) for step in range(5)}


async def test_rollouts_go_on_while_the_policy_learns():
    done: list[str] = []

    @dataclass
    class Slow(Fake):
        async def update(self, groups: tuple[Group, ...]) -> dict[str, float]:
            await asyncio.sleep(0.2)
            done.append("update")
            return await super().update(groups)

    class Noted(FakePool):
        async def collect(self, plan: RolloutPlan, on_finish: Callable[[Rollout], None]) -> tuple[Group, ...]:
            groups = await super().collect(plan, on_finish)
            done.append(plan.phase)
            return groups

    slow = Slow()
    await train(2, rollouts_of(Noted(slow), 2, 1), slow, slow)
    assert done == ["step-00000", "step-00001", "update", "update"]


async def test_what_was_begun_early_is_stopped_when_the_run_is():
    stopped: list[str] = []

    class Endless(FakePool):
        async def collect(self, plan: RolloutPlan, on_finish: Callable[[Rollout], None]) -> tuple[Group, ...]:
            if plan.phase == "step-00000":
                return ()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                stopped.append(plan.phase)
                raise
            return ()

    rollouts = rollouts_of(Endless(Fake()), 3, 2)
    await rollouts.collect(0)
    await asyncio.sleep(0)
    await rollouts.close()
    assert sorted(stopped) == ["step-00001", "step-00002"]


def test_staleness_counts_the_updates_since_each_sampled_token():
    segment = Segment(
        token_ids=np.arange(4, dtype=np.int32),
        sampled=np.array([False, True, True, True]),
        logprobs=None,
        versions=np.array([-1, 1, 2, 3], np.int32),
    )
    rollout = Rollout(task="t", kind="", attempt=0, segments=(segment,), reward=1.0, failure=None)
    assert staleness([rollout], 3) == 1.0
    assert staleness([], 3) == 0.0
