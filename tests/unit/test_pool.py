import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dockyard.config import RolloutConfig, RunConfig
from dockyard.errors import DockyardError
from dockyard.rollout import pool as pool_module
from dockyard.rollout.plan import Attempt, RolloutPlan
from dockyard.rollout.pool import RolloutPool
from dockyard.run_dir.run import RunDir
from dockyard.types import Blame, Failure, Rollout, Task

TASKS = [Task(name=f"t{index}", path=Path(f"t{index}"), kind="") for index in range(3)]
PLAN = RolloutPlan(phase="step-00000", tasks=TASKS, group_size=2, temperature=1.0, seed=0, stream="s")


def rollout_of(attempt: Attempt, reward: float | None, blame: Blame | None = None) -> Rollout:
    failure = Failure(cause="environment_died", blame=blame, message="it broke") if blame else None
    return Rollout(task=attempt.task.name, kind="", attempt=attempt.index, segments=(), reward=reward, failure=failure)


@dataclass
class FakeRunner:
    """Answers each attempt as given; counts how many run concurrently."""

    answer: Callable[[Attempt, int], Rollout]
    made: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    async def run(self, attempt: Attempt) -> Rollout:
        self.made.append(attempt.name)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.01 * (3 - attempt.group))  # the later groups finish first
        self.running -= 1
        return self.answer(attempt, self.made.count(attempt.name))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_module, "_FIRST_WAIT_S", 0.0)


@pytest.fixture
def run(tmp_path: Path):
    with RunDir.create(tmp_path / "run", RunConfig()) as opened:
        yield opened


def pool_of(run: RunDir, runner: FakeRunner, **config: object) -> RolloutPool:
    return RolloutPool(
        runner=runner, run=run, config=RolloutConfig.model_validate(config), transcribe=lambda rollout: rollout.task
    )


def good(attempt: Attempt, _tries: int) -> Rollout:
    return rollout_of(attempt, attempt.group + attempt.index / 10)


async def test_groups_come_in_order_however_their_rollouts_finish(run: RunDir):
    runner = FakeRunner(good)
    groups = await pool_of(run, runner, concurrency=2).collect(PLAN, lambda _: None)
    assert [[rollout.reward for rollout in group.rollouts] for group in groups] == [[0, 0.1], [1, 1.1], [2, 2.1]]
    assert runner.most_running == 2


async def test_finished_rollouts_are_not_made_again(run: RunDir):
    await pool_of(run, FakeRunner(good)).collect(
        RolloutPlan(phase="step-00000", tasks=TASKS[:2], group_size=2, temperature=1.0, seed=0, stream="s"),
        lambda _: None,
    )
    runner, seen = FakeRunner(good), []
    groups = await pool_of(run, runner).collect(PLAN, seen.append)
    assert sorted(runner.made) == ["step-00000-002-00", "step-00000-002-01"]
    assert len(seen) == 6
    assert groups[0].rollouts[1].reward == pytest.approx(0.1)


async def test_infrastructure_failures_are_tried_again_and_the_policys_own_are_not(run: RunDir):
    def flaky(attempt: Attempt, tries: int) -> Rollout:
        if attempt.group == 0 and tries < 3:
            return rollout_of(attempt, None, Blame.INFRASTRUCTURE)
        return rollout_of(attempt, 0.0, Blame.POLICY if attempt.group == 1 else None)

    runner = FakeRunner(flaky)
    groups = await pool_of(run, runner, retries=2).collect(PLAN, lambda _: None)
    assert [runner.made.count(f"step-00000-{group:03}-00") for group in range(3)] == [3, 1, 1]
    assert all(rollout.reward == 0.0 for group in groups for rollout in group.rollouts)


async def test_a_rollout_that_stays_broken_is_lost_alone_and_recorded_as_such(run: RunDir):
    def one_lost(attempt: Attempt, _tries: int) -> Rollout:
        lost = attempt.name == "step-00000-001-01"
        return rollout_of(attempt, None, Blame.INFRASTRUCTURE) if lost else rollout_of(attempt, 1.0)

    groups = await pool_of(run, FakeRunner(one_lost), retries=0).collect(PLAN, lambda _: None)
    assert [rollout.reward for rollout in groups[1].rollouts] == [1.0, None]
    assert sum(item.rollout.reward is None for item in run.read_rollouts("step-00000")) == 1


async def test_a_step_that_loses_too_much_stops_the_run_and_would_be_tried_again(run: RunDir):
    def mostly_lost(attempt: Attempt, _tries: int) -> Rollout:
        return rollout_of(attempt, None, Blame.INFRASTRUCTURE) if attempt.group else rollout_of(attempt, 1.0)

    with pytest.raises(DockyardError, match=r"4 of 6 rollouts of step-00000 were lost .*environment_died 4x.*it broke"):
        await pool_of(run, FakeRunner(mostly_lost), retries=0, max_lost_share=0.5).collect(PLAN, lambda _: None)
    runner = FakeRunner(good)
    await pool_of(run, runner).collect(PLAN, lambda _: None)
    assert len(runner.made) == 4


def test_each_rollout_has_its_own_seed_and_phases_of_one_stream_share_them():
    before = RolloutPlan(phase="eval-before", tasks=TASKS, group_size=2, temperature=1.0, seed=0, stream="eval")
    after = RolloutPlan(phase="eval-after", tasks=TASKS, group_size=2, temperature=1.0, seed=0, stream="eval")
    seeds = [attempt.seed for attempt in before.attempts()]
    assert len(set(seeds)) == 6
    assert seeds == [attempt.seed for attempt in after.attempts()]


async def test_a_run_whose_tasks_changed_is_not_continued(run: RunDir):
    await pool_of(run, FakeRunner(good)).collect(PLAN, lambda _: None)
    other = RolloutPlan(phase="step-00000", tasks=TASKS[::-1], group_size=2, temperature=1.0, seed=0, stream="s")
    with pytest.raises(DockyardError, match="recorded `t[02]` in step-00000"):
        await pool_of(run, FakeRunner(good)).collect(other, lambda _: None)


async def test_what_is_finished_when_the_run_is_stopped_is_recorded(run: RunDir):
    finished: list[Rollout] = []

    def answer(attempt: Attempt, tries: int) -> Rollout:
        finished.append(good(attempt, tries))
        return finished[-1]

    def slow(rollout: Rollout) -> str:
        time.sleep(0.1)  # a slow disk
        return ""

    pool = RolloutPool(runner=FakeRunner(answer), run=run, config=RolloutConfig(), transcribe=slow)
    collecting = asyncio.create_task(pool.collect(PLAN, lambda _: None))
    while len(finished) < 6:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0)
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting
    await asyncio.get_running_loop().shutdown_default_executor()
    assert len(run.read_rollouts("step-00000")) == 6


async def test_orders_at_the_same_time_share_the_slots(run: RunDir):
    runner = FakeRunner(good)
    pool = pool_of(run, runner, concurrency=3)
    second = RolloutPlan(phase="step-00001", tasks=TASKS, group_size=2, temperature=1.0, seed=0, stream="s")
    await asyncio.gather(pool.collect(PLAN, lambda _: None), pool.collect(second, lambda _: None))
    assert runner.most_running == 3
    assert [name.startswith("step-00000") for name in runner.made] == [True] * 6 + [False] * 6


async def test_what_cannot_go_better_is_not_tried_again(run: RunDir):
    def missing(attempt: Attempt, _tries: int) -> Rollout:
        failure = Failure(cause="agent_missing", blame=Blame.INFRASTRUCTURE, message="no `qwen`")
        return replace(rollout_of(attempt, None), failure=failure)

    runner = FakeRunner(missing)
    with pytest.raises(DockyardError, match="agent_missing 6x"):
        await pool_of(run, runner, retries=5).collect(PLAN, lambda _: None)
    assert len(runner.made) == 6
