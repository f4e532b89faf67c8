"""Groups whose rewards are all alike are replaced by others, the same ones in a resumed run."""

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dockyard.config import GRPOConfig, RolloutConfig, RunConfig, TasksConfig
from dockyard.rl.pack import examples_of
from dockyard.rollout.plan import Attempt
from dockyard.rollout.pool import RolloutPool
from dockyard.run_dir.run import RunDir, step_phase
from dockyard.trainer.display import TrainingProgress
from dockyard.trainer.dynamic_sampling import group_metrics
from dockyard.trainer.loop import TaskRollouts
from dockyard.types import Group, Rollout, Task

STEPS, WANTED = 3, 4


def tasks_of(num_dull: int, num_telling: int) -> list[Task]:
    names = [*(f"dull-{index}" for index in range(num_dull)), *(f"telling-{index}" for index in range(num_telling))]
    return [Task(name=name, path=Path(name), kind="") for name in names]


@dataclass
class FakeRunner:
    """Rollouts of a dull task all get the same reward. After `hangs_after` rollouts it hangs until it is killed."""

    hangs_after: int | None = None
    made: list[str] = field(default_factory=list)
    hung: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, attempt: Attempt) -> Rollout:
        if len(self.made) == self.hangs_after:
            self.hung.set()
            await asyncio.Event().wait()
        self.made.append(attempt.name)
        reward = 1.0 if attempt.task.name.startswith("dull") else float(attempt.index)
        return Rollout(task=attempt.task.name, kind="", attempt=attempt.index, segments=(), reward=reward, failure=None)


def config_of(*, max_staleness: int = 0, max_tries: int = 3) -> RunConfig:
    grpo = GRPOConfig(group_size=2, tasks_per_step=WANTED, dynamic_sampling=True, max_tries=max_tries)
    tasks = TasksConfig(train=Path("anywhere"))
    return RunConfig(steps=STEPS, grpo=grpo, tasks=tasks, rollout=RolloutConfig(max_staleness=max_staleness))


def rollouts_of(run: RunDir, runner: FakeRunner, tasks: list[Task]) -> TaskRollouts:
    pool = RolloutPool(runner=runner, run=run, config=run.config.rollout, transcribe=lambda rollout: rollout.task)
    return TaskRollouts(pool=pool, tasks=tasks, config=run.config, progress=TrainingProgress(STEPS))


async def collected(rollouts: TaskRollouts) -> list[list[str]]:
    """The tasks of each step's groups."""
    try:
        return [[group.task for group in await rollouts.collect(step)] for step in range(STEPS)]
    finally:
        await rollouts.close()


def telling(names: list[str]) -> int:
    return sum(name.startswith("telling") for name in names)


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_groups_without_a_difference_are_replaced_until_the_step_has_enough(tmp_path: Path, max_staleness: int):
    with RunDir.create(tmp_path / "run", config_of(max_staleness=max_staleness)) as run:
        runner = FakeRunner()
        steps = await collected(rollouts_of(run, runner, tasks_of(6, 10)))
    assert [telling(step) for step in steps] == [WANTED] * STEPS
    assert any(len(step) > WANTED for step in steps)
    assert all(len(set(step)) == len(step) for step in steps)  # replaced by other tasks
    assert len(runner.made) == len(set(runner.made)) == 2 * sum(map(len, steps))


async def test_a_step_goes_on_with_what_there_is_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with RunDir.create(tmp_path / "run", config_of(max_tries=2)) as run, caplog.at_level(logging.WARNING):
        steps = await collected(rollouts_of(run, FakeRunner(), tasks_of(5, 1)))
    assert [len(step) for step in steps] == [2 * WANTED] * STEPS
    assert "wanted groups have rewards that differ, after 8 were made" in caplog.text


async def kill(rollouts: TaskRollouts, runner: FakeRunner) -> None:
    going = asyncio.create_task(collected(rollouts))
    await runner.hung.wait()
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_resumed_run_has_the_same_groups_and_makes_none_twice(tmp_path: Path, max_staleness: int):
    tasks, config = tasks_of(6, 10), config_of(max_staleness=max_staleness)
    with RunDir.create(tmp_path / "whole", config) as run:
        whole = FakeRunner()
        expected = asyncio.run(collected(rollouts_of(run, whole, tasks)))
    for hangs_after in range(0, len(whole.made), 5):
        path = tmp_path / f"killed-{hangs_after}"
        with RunDir.create(path, config) as run:
            killed = FakeRunner(hangs_after=hangs_after)
            asyncio.run(kill(rollouts_of(run, killed, tasks), killed))
        with RunDir.resume(path) as run:
            assert asyncio.run(collected(rollouts_of(run, FakeRunner(), tasks))) == expected
            texts = [run.paths.rollouts_of(step_phase(step)).read_text() for step in range(STEPS)]
        assert sum(text.count("\n") for text in texts) == len(whole.made)


async def test_the_step_counts_what_was_replaced_and_learns_from_the_rest(tmp_path: Path):
    with RunDir.create(tmp_path / "run", config_of()) as run:
        groups = await rollouts_of(run, FakeRunner(), tasks_of(4, 0)).collect(0)
        assert group_metrics(groups, run.config.grpo) == {
            "group/count": 3 * WANTED,
            "group/zero_variance": 3 * WANTED,
            "group/resampled": 2 * WANTED,
        }
        assert examples_of(groups, run.config.grpo, with_idle=True) == []


def test_without_dynamic_sampling_nothing_is_replaced(tmp_path: Path):
    groups = [Group(task="t", rollouts=())]
    assert group_metrics(groups, GRPOConfig())["group/resampled"] == 0
    config = config_of()
    plain = config.model_copy(update={"grpo": GRPOConfig(group_size=2, tasks_per_step=WANTED)})
    with RunDir.create(tmp_path / "run", plain) as run:
        steps = asyncio.run(collected(rollouts_of(run, FakeRunner(), tasks_of(6, 10))))
    assert [len(step) for step in steps] == [WANTED] * STEPS
