"""`tasks.order`: a function of the user's chooses the tasks of each step, the same ones in a resumed run."""

import asyncio
import importlib.util
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from killable_runs import GROUP_SIZE, TASKS_PER_STEP, adapter, kill_after, num_recorded, start
from killable_runs import settings as killable_settings
from processes import wait_until_gone

from dockyard.config import RunConfig
from dockyard.errors import DockyardError
from dockyard.rollout.plan import Attempt
from dockyard.rollout.pool import RolloutPool
from dockyard.run_dir.run import RunDir
from dockyard.tasks.folder import load_tasks
from dockyard.tasks.order import Attempted, CustomOrder, attempts_of, due
from dockyard.trainer.display import TrainingProgress
from dockyard.trainer.loop import TaskRollouts
from dockyard.types import Blame, Failure, Rollout, Task

EXTEND = Path(__file__).parents[2] / "examples" / "extend"
STEPS, COUNT = 6, 2
TASKS = [Task(name=f"task-{index}", path=Path(f"task-{index}"), kind="") for index in range(5)]
SPY = """
SEEN = []

def order(tasks, history, count, rng):
    SEEN.append(history)
    solved = {item.task: sum(reward or 0 for reward in item.rewards) for item in history}
    return sorted(rng.sample(tasks, len(tasks)), key=lambda task: solved.get(task.name, 0))[:count]
"""


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that a run names as `spy`. It notes what its function was given."""
    (tmp_path / "spy.py").write_text(SPY)
    return import_file(tmp_path / "spy.py", monkeypatch)


def import_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, file.stem, module)
    return module


@dataclass
class FakeRunner:
    """A task's reward is its number, but the second rollout of `task-1` is always lost. After some it hangs."""

    hangs_after: int | None = None
    made: int = 0
    hung: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, attempt: Attempt) -> Rollout:
        if self.made == self.hangs_after:
            self.hung.set()
            await asyncio.Event().wait()
        self.made += 1
        await asyncio.sleep(random.uniform(0, 0.002))  # they finish in any order
        name, lost = attempt.task.name, attempt.task.name == "task-1" and attempt.index == 1
        failure = Failure(cause="gateway_down", blame=Blame.INFRASTRUCTURE, message="") if lost else None
        reward = None if lost else float(name[-1]) + attempt.index % 2
        return Rollout(task=name, kind="", attempt=attempt.index, segments=(), reward=reward, failure=failure)


def config_of(reference: str, **more: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "steps": STEPS,
            "grpo": {"group_size": 2, "tasks_per_step": COUNT},
            "tasks": {"train": "anywhere", "order": reference},
            "rollout": {"retries": 0, "concurrency": 3},
            **more,
        }
    )


def rollouts_of(run: RunDir, runner: FakeRunner) -> TaskRollouts:
    pool = RolloutPool(runner=runner, run=run, config=run.config.rollout, transcribe=lambda rollout: rollout.task)
    order = CustomOrder(reference=run.config.tasks.order or "", tasks=TASKS, run=run)
    return TaskRollouts(pool=pool, tasks=TASKS, config=run.config, progress=TrainingProgress(STEPS), choose=order.due)


async def collected(rollouts: TaskRollouts, first: int = 0) -> list[list[str]]:
    """The tasks of each step's groups."""
    try:
        return [[group.task for group in await rollouts.collect(step)] for step in range(first, STEPS)]
    finally:
        await rollouts.close()


async def kill(rollouts: TaskRollouts, runner: FakeRunner) -> None:
    going = asyncio.create_task(collected(rollouts))
    await runner.hung.wait()
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)


def test_the_function_decides_the_tasks_and_sees_each_reward_and_each_loss(tmp_path: Path, spy: ModuleType):
    with RunDir.create(tmp_path / "run", config_of("spy:order")) as run:
        steps = asyncio.run(collected(rollouts_of(run, FakeRunner())))
    assert len(spy.SEEN) == STEPS
    assert spy.SEEN[0] == ()
    for step, history in enumerate(spy.SEEN):
        assert [(item.step, item.task) for item in history] == [
            (earlier, task) for earlier in range(step) for task in steps[earlier]
        ]
    rewards = {item.task: item.rewards for item in spy.SEEN[-1]}
    assert rewards["task-1"] == (1.0, None)
    assert rewards["task-2"] == (2.0, 3.0)
    assert steps[-1] != [task.name for task in due(TASKS, STEPS - 1, COUNT, 0, kind_of=lambda task: "")]


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_the_history_has_only_steps_that_are_finished_by_rule(tmp_path: Path, spy: ModuleType, max_staleness: int):
    config = config_of("spy:order", rollout={"max_staleness": max_staleness, "retries": 0})
    with RunDir.create(tmp_path / "run", config) as run:
        asyncio.run(collected(rollouts_of(run, FakeRunner())))
        recorded = [attempts_of(run, step) for step in range(STEPS)]
    for step, history in enumerate(spy.SEEN):
        assert list(history) == [item for earlier in recorded[: max(step - max_staleness, 0)] for item in earlier]


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("dynamic_sampling", [False, True])
def test_a_killed_run_chooses_the_same_tasks_from_any_checkpoint(
    tmp_path: Path, spy: ModuleType, max_staleness: int, dynamic_sampling: bool
):
    config = config_of(
        "spy:order",
        rollout={"max_staleness": max_staleness, "retries": 0},
        grpo={"group_size": 2, "tasks_per_step": COUNT, "dynamic_sampling": dynamic_sampling},
    )
    with RunDir.create(tmp_path / "whole", config) as run:
        whole = FakeRunner()
        expected = asyncio.run(collected(rollouts_of(run, whole)))
    assert any(len(step) > COUNT for step in expected) == dynamic_sampling  # `task-1` has one reward: no difference
    for hangs_after in range(1, whole.made, 5):
        path = tmp_path / f"killed-{hangs_after}"
        with RunDir.create(path, config) as run:
            killed = FakeRunner(hangs_after=hangs_after)
            asyncio.run(kill(rollouts_of(run, killed), killed))
        with RunDir.resume(path) as run:
            assert asyncio.run(collected(rollouts_of(run, FakeRunner()))) == expected
        with RunDir.resume(path) as run:  # from the checkpoint after step 3, as a process that saw no earlier step
            assert asyncio.run(collected(rollouts_of(run, FakeRunner()), first=3)) == expected[3:]


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        ("tasks[:1]", "which returned 1 tasks for step 0; it must return 2"),
        ("list(tasks)", "which returned 5 tasks for step 0; it must return 2"),
        ("[task.name for task in tasks[:2]]", "`task-0` for step 0, which is not one of the tasks that it was given"),
        ("None", "which returned NoneType for step 0, not a list"),
        ("1 / 0", "which failed on step 0: ZeroDivisionError: division by zero ("),
    ],
)
def test_a_wrong_result_names_the_function_and_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: str, says: str
):
    (tmp_path / "wrong.py").write_text(f"def order(tasks, history, count, rng):\n    return {returns}\n")
    import_file(tmp_path / "wrong.py", monkeypatch)
    with RunDir.create(tmp_path / "run", config_of("wrong:order")) as run, pytest.raises(DockyardError) as raised:
        asyncio.run(collected(rollouts_of(run, FakeRunner())))
    assert raised.value.message.startswith("`tasks.order` is `wrong:order`, which ")
    assert says in raised.value.message
    assert raised.value.hint


def test_a_task_may_be_chosen_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "twice.py").write_text("def order(tasks, history, count, rng):\n    return [tasks[3]] * count\n")
    import_file(tmp_path / "twice.py", monkeypatch)
    with RunDir.create(tmp_path / "run", config_of("twice:order")) as run:
        assert asyncio.run(collected(rollouts_of(run, FakeRunner()))) == [["task-3", "task-3"]] * STEPS
        assert [item.rewards for item in attempts_of(run, 0)] == [(3.0, 4.0), (3.0, 4.0)]


def chosen_by(function: ModuleType, run: RunDir, tasks: Sequence[Task], step: int) -> list[str]:
    """What the example's function answers to what the run recorded."""
    history = [item for earlier in range(step) for item in attempts_of(run, earlier)]
    rng = random.Random(f"{run.config.seed}-order-{step}")
    return [task.name for task in function.near_half(tasks, history, TASKS_PER_STEP, rng)]


def test_the_example_trains_and_a_killed_run_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps, log = 4, tmp_path / "log"
    values = killable_settings(tmp_path, steps) | {"tasks.order": "order:near_half", "seed": 5}
    arguments = [f"--{key}={value}" for key, value in values.items()]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start([*arguments, f"--run_dir={whole}"], log, cwd=EXTEND).wait() == 0, log.read_text()
    example, tasks = import_file(EXTEND / "order.py", monkeypatch), load_tasks(tmp_path / "train")
    with RunDir.resume(whole) as run:
        made = [[item.task for item in attempts_of(run, step)] for step in range(steps)]
        assert made == [chosen_by(example, run, tasks, step) for step in range(steps)]
        usual = [due(tasks, step, TASKS_PER_STEP, run.config.seed, kind_of=lambda task: "") for step in range(steps)]
    assert made != [[task.name for task in step] for step in usual]

    moment = random.SystemRandom().randrange(1, (steps - 1) * TASKS_PER_STEP * GROUP_SIZE)
    process = start([*arguments, f"--run_dir={killed}"], log, cwd=EXTEND)
    wait_until_gone(kill_after(process, killed, moment, delay_s=0.1))
    assert start([f"--resume={killed}"], log, cwd=EXTEND).wait() == 0, log.read_text()
    assert num_recorded(killed) == steps * TASKS_PER_STEP * GROUP_SIZE
    with RunDir.resume(killed) as run:
        assert [[item.task for item in attempts_of(run, step)] for step in range(steps)] == made, f"moment {moment}"
    assert adapter(killed, steps) == adapter(whole, steps), f"moment {moment}"


def test_the_example_prefers_new_tasks_then_those_that_are_solved_half_of_the_time(monkeypatch: pytest.MonkeyPatch):
    example = import_file(EXTEND / "order.py", monkeypatch)
    rewards = {"task-0": (0.0, 0.0), "task-1": (0.0, 1.0), "task-2": (1.0, None), "task-3": (1.0, 0.0, 0.0)}
    history = [Attempted(step=0, task=task, rewards=found) for task, found in rewards.items()]
    first = example.near_half(TASKS, history, 3, random.Random(0))
    assert {task.name for task in first[:2]} == {"task-4", "task-1"}
    assert first[2].name == "task-3"
    assert len(example.near_half(TASKS[:2], history, 5, random.Random(0))) == 5
