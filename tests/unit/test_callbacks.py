"""Callbacks: when they are called, and what happens when they fail, stop the run, or are written wrongly."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dockyard
from dockyard.callbacks import RunCallbacks, load_callbacks
from dockyard.cli import main
from dockyard.config import RolloutConfig, RunConfig
from dockyard.errors import DockyardError, StopRun, UsageError
from dockyard.rollout.plan import Attempt, RolloutPlan
from dockyard.rollout.pool import RolloutPool
from dockyard.run_dir.run import EVAL_BEFORE, RunDir, step_phase
from dockyard.types import Rollout, Task

TASKS = [Task(name=f"t{index}", path=Path(f"t{index}"), kind="") for index in range(2)]
DEMO = ["--tasks.source=demo", "--tasks.num_train=4", "--tasks.num_heldout=4", "--agent=oracle", "--run_dir=mine"]

NOTES = """
import json

def note(*words):
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps(words) + "\\n")
"""
ALL = f"""{NOTES}
class C:
    def after_rollout(self, rollout):
        note("rollout", rollout.task, rollout.attempt, rollout.reward)

    def after_group(self, group):
        note("group", group.task, [rollout.attempt for rollout in group.rollouts], group.spare)

    def after_step(self, step, metrics):
        note("step", step, metrics)

    def after_evaluation(self, version, scores):
        note("evaluation", version, scores)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("my_callbacks", None)
    logging.getLogger("dockyard").setLevel(logging.NOTSET)


def write(code: str) -> None:
    Path("my_callbacks.py").write_text(code)


def loaded(code: str, last_recorded: int = -1) -> RunCallbacks:
    write(code)
    return load_callbacks(["my_callbacks:C"], last_recorded=last_recorded)


def calls() -> list[list[Any]]:
    file = Path("calls.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    return found


def plan(phase: str, tasks: list[Task] = TASKS) -> RolloutPlan:
    return RolloutPlan(phase=phase, tasks=tasks, group_size=2, temperature=1.0, seed=0, stream=phase)


class FakeRunner:
    """Makes rollouts at once."""

    async def run(self, attempt: Attempt) -> Rollout:
        reward = attempt.group + attempt.index / 10
        return Rollout(task=attempt.task.name, kind="", attempt=attempt.index, segments=(), reward=reward, failure=None)


@pytest.fixture
def pool_of(tmp_path: Path) -> Iterator[Callable[[RunCallbacks], RolloutPool]]:
    with RunDir.create(tmp_path / "run", RunConfig()) as run:

        def pool(callbacks: RunCallbacks) -> RolloutPool:
            return RolloutPool(
                runner=FakeRunner(),
                run=run,
                config=RolloutConfig(concurrency=1),
                transcribe=lambda _: "",
                watch=callbacks.rollout_finished,
            )

        yield pool


type PoolOf = Callable[[RunCallbacks], RolloutPool]


async def test_each_rollout_is_reported_once_a_group_after_its_rollouts_and_the_step_last(pool_of: PoolOf):
    callbacks = loaded(ALL)
    pool = pool_of(callbacks)
    callbacks.start(0)
    await pool.collect(plan(step_phase(0)), lambda _: None)
    callbacks.after_step(0, {"reward/mean": 0.5})
    *before, last = calls()
    assert last == ["step", 0, {"reward/mean": 0.5}]
    for task, rewards in ("t0", [0.0, 0.1]), ("t1", [1.0, 1.1]):
        *rollouts, group = [call for call in before if call[1] == task]
        assert sorted(rollouts) == [["rollout", task, index, reward] for index, reward in enumerate(rewards)]
        assert group == ["group", task, [0, 1], False]
    assert len(before) == 6


async def test_rollouts_that_finish_early_are_reported_with_their_own_step(pool_of: PoolOf):
    callbacks = loaded(ALL)
    pool = pool_of(callbacks)
    callbacks.start(0)
    await pool.collect(plan(step_phase(1), TASKS[:1]), lambda _: None)
    assert calls() == []
    callbacks.after_step(0, {})
    assert [call[0] for call in calls()] == ["step", "rollout", "rollout", "group"]
    await pool.collect(plan(step_phase(1), TASKS[:1]).further(0), lambda _: None)
    callbacks.after_step(1, {})
    assert calls() == [["step", 1, {}]]


async def test_an_evaluation_is_reported_with_its_step_and_its_rollouts_are_not(pool_of: PoolOf):
    callbacks = loaded(ALL)
    await pool_of(callbacks).collect(plan(EVAL_BEFORE), lambda _: None)
    callbacks.evaluated(EVAL_BEFORE, 0, {"reward": 0.5})
    assert calls() == []
    callbacks.after_step(0, {})
    callbacks.report_evaluations()
    assert calls() == [["step", 0, {}], ["evaluation", 0, {"reward": 0.5}]]


async def test_a_resumed_run_repeats_no_call(pool_of: PoolOf):
    first = loaded(ALL)
    await pool_of(first).collect(plan(step_phase(0), TASKS[:1]), lambda _: None)
    await pool_of(first).collect(plan(EVAL_BEFORE), lambda _: None)
    assert len(calls()) == 3
    again = loaded(ALL, last_recorded=0)
    pool = pool_of(again)
    await pool.collect(plan(EVAL_BEFORE), lambda _: None)
    again.evaluated(EVAL_BEFORE, 0, {"reward": 0.5})
    again.report_evaluations()
    await pool.collect(plan(step_phase(0)), lambda _: None)
    again.after_step(0, {})
    again.after_step(1, {})
    assert calls() == [
        ["rollout", "t1", 0, 1.0],
        ["rollout", "t1", 1, 1.1],
        ["group", "t1", [0, 1], False],
        ["step", 1, {}],
    ]


async def test_a_group_that_was_recorded_in_part_is_reported_when_it_is_complete(pool_of: PoolOf):
    pool = pool_of(loaded(ALL))
    wanted = plan(step_phase(0), TASKS[:1])
    pool.run.write_rollout(wanted.phase, await FakeRunner().run(wanted.attempts()[1]))
    await pool.collect(wanted, lambda _: None)
    assert calls() == [["rollout", "t0", 0, 0.0], ["group", "t0", [0, 1], False]]


async def test_a_callback_stops_the_rollouts_of_a_step(pool_of: PoolOf):
    code = (
        "import dockyard\nclass C:\n    def after_rollout(self, rollout):\n        raise dockyard.StopRun('enough')\n"
    )
    with pytest.raises(StopRun, match="enough"):
        await pool_of(loaded(code)).collect(plan(step_phase(0)), lambda _: None)


async def test_a_callback_that_fails_warns_once_is_still_called_and_is_counted(
    pool_of: PoolOf, caplog: pytest.LogCaptureFixture, here: Path
):
    code = f"""{NOTES}
import json
class C:
    def after_rollout(self, rollout):
        note("called")
        if rollout.attempt:
            return json.loads("[")
    def after_step(self, step, metrics):
        raise KeyError(step)
"""
    callbacks = loaded(code)
    await pool_of(callbacks).collect(plan(step_phase(0)), lambda _: None)
    callbacks.after_step(0, {})
    assert len(calls()) == 4
    line = code.splitlines().index('            return json.loads("[")') + 1
    first, second = [record.message for record in caplog.records]
    assert first.startswith("callback `my_callbacks:C.after_rollout` failed: JSONDecodeError: Expecting value: line 1")
    assert f"(`{here / 'my_callbacks.py'}`, line {line}); the run continues" in first
    assert second.startswith("callback `my_callbacks:C.after_step` failed: KeyError: 0 (")
    callbacks.close()
    assert [record.message for record in caplog.records[2:]] == [
        "callback `my_callbacks:C.after_rollout` failed in 2 of 4 calls",
        "callback `my_callbacks:C.after_step` failed in 1 of 1 calls",
    ]


async def test_a_callback_that_says_so_stops_the_run_with_an_error(pool_of: PoolOf):
    code = "class C:\n    stop_on_error = True\n    def after_rollout(self, rollout):\n        1 / 0\n"
    with pytest.raises(DockyardError) as raised:
        await pool_of(loaded(code)).collect(plan(step_phase(0)), lambda _: None)
    assert "`my_callbacks:C.after_rollout` failed: ZeroDivisionError: division by zero" in raised.value.message
    assert raised.value.message.endswith("my_callbacks.py`, line 4)")
    assert "`--resume`" in raised.value.hint


def test_the_other_callbacks_are_called_when_one_fails():
    write(f"{ALL}\nclass D:\n    def after_step(self, step, metrics):\n        1 / 0\n")
    callbacks = load_callbacks(["my_callbacks:D", "my_callbacks:C"])
    callbacks.after_step(0, {})
    assert calls() == [["step", 0, {}]]


def test_a_callback_cannot_change_the_metrics_of_the_run():
    callbacks = loaded("class C:\n    def after_step(self, step, metrics):\n        metrics.clear()\n")
    metrics = {"reward/mean": 1.0}
    callbacks.after_step(0, metrics)
    assert metrics == {"reward/mean": 1.0}


def test_a_class_may_derive_from_the_public_one():
    method = "    def after_step(self, step, metrics):\n        self.seen = step\n"
    callbacks = loaded(f"import dockyard\nclass C(dockyard.Callbacks):\n{method}")
    callbacks.after_step(3, {})
    assert callbacks.instances[0].wrapped.seen == 3  # pyright: ignore[reportAttributeAccessIssue]
    assert dockyard.Callbacks.stop_on_error is False


@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [
        (
            "class C:\n    def after_step(self, step): ...",
            "whose signature is `def after_step(self, step)`",
            "define `def after_step(self, step: int, metrics: Mapping[str, float]) -> None`",
        ),
        (
            "class C:\n    def after_stepp(self, step, metrics): ...",
            "`after_stepp` is not a callback; did you mean `after_step`?",
            "`def after_step(self, step: int, metrics: Mapping[str, float]) -> None`",
        ),
        (
            "class C:\n    def after_epoch(self): ...\n    def after_group(self, group): ...",
            "`callbacks` is `my_callbacks:C`: `after_epoch` is not a callback",
            "def after_step(self, step: int",
        ),
        ("class C:\n    def afterstep(self): ...", "`afterstep` is not a callback; did you mean `after_step`?", ""),
        ("class C:\n    async def after_group(self, group): ...", "must be a plain `def`", "def after_group"),
        ("class C: ...", "it lacks after_evaluation, after_group", "one or more of"),
        ("def C(): ...", "which is not a class", "def after_rollout(self, rollout: Rollout) -> None"),
        (
            "class C:\n    def __init__(self): 1 / 0\n    def after_group(self, group): ...",
            "cannot be created: ZeroDivisionError: division by zero",
            "correct `C.__init__`",
        ),
    ],
)
def test_a_class_that_is_wrong_is_refused_with_what_is_right(code: str, message: str, hint: str):
    with pytest.raises(UsageError) as raised:
        loaded(code)
    assert "`callbacks` " in raised.value.message
    assert message in raised.value.message
    assert hint in raised.value.hint


def test_a_dry_run_checks_the_class_and_creates_no_instance(capsys: pytest.CaptureFixture[str]):
    write(f"{ALL}\n    def __init__(self):\n        note('created')\n")
    assert main(["train", *DEMO, '--callbacks=["my_callbacks:C"]', "--dry-run"]) == 0
    assert 'callbacks = ["my_callbacks:C"]' in capsys.readouterr().out
    assert calls() == []


def test_a_class_that_is_not_in_a_list_is_answered_with_how_to_write_one(capsys: pytest.CaptureFixture[str]):
    assert main(["train", *DEMO, "--callbacks", "my_callbacks:C", "--dry-run"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "is `my_callbacks:C`; it must be a list" in shown
    assert """write `callbacks = ["module:Class"]`, or `--callbacks '["module:Class"]'` on the command line""" in shown


def test_a_name_without_a_class_is_refused():
    with pytest.raises(UsageError, match="`callbacks` has `hooks`, which is not `module:Class`"):
        load_callbacks(["hooks"])


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("class C:\n    def after_step(self, step): ...", "define `def after_step(self, step: int, metrics"),
        (
            "class C:\n    def __init__(self, x): ...\n    def after_step(self, step, metrics): ...",
            "`my_callbacks:C`, which cannot be created without arguments: missing a required argument: 'x'",
        ),
    ],
)
def test_a_wrong_class_is_refused_before_a_run_folder_is_made(
    here: Path, code: str, says: str, capsys: pytest.CaptureFixture[str]
):
    write(code)
    for verb in ("train", "rollout", "eval"):
        assert main([verb, *DEMO, '--callbacks=["my_callbacks:C"]']) == 2
        assert says in capsys.readouterr().err
        assert main([verb, *DEMO, '--callbacks=["my_callbacks:C"]', "--dry-run"]) == 2
        assert says in capsys.readouterr().err
    assert not (here / "mine").exists()


@pytest.mark.parametrize("backend", ["slime", "prime-rl"])
def test_backends_refuse_callbacks(backend: str, capsys: pytest.CaptureFixture[str]):
    write(ALL)
    words = ["--callbacks", '["my_callbacks:C"]', "--tasks.source=demo", "--dry-run"]
    assert main(["backend", backend, *words]) == 2
    assert f"{backend} ignores `callbacks`" in capsys.readouterr().err


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")
def test_rollouts_and_evaluations_call_them_and_a_resumed_run_does_not_again():
    write(ALL)
    run = dockyard.run_rollouts(
        {"tasks": {"source": "demo", "num_train": 4}, "agent.name": "oracle", "callbacks": ["my_callbacks:C"]},
        num_tasks=2,
        grpo={"group_size": 2},
        run_dir="rollouts",
    )
    assert sorted(call[0] for call in calls()) == ["group"] * 2 + ["rollout"] * 4
    dockyard.run_rollouts(resume=run.path)
    assert calls() == []
    assert main(["eval", *DEMO, "--run_dir=eval", "--eval.samples=2", '--callbacks=["my_callbacks:C"]']) == 0
    *rollouts, evaluation = calls()
    assert [call[0] for call in rollouts] == ["rollout"] * 8
    assert evaluation[:2] == ["evaluation", 0]
    scores = evaluation[2]
    assert (scores["reward"], scores["pass@2"]) == (1.0, 1.0)
    assert scores["pass@1_low"] < 1.0
    assert main(["eval", "--resume=eval"]) == 0
    assert calls() == []


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")
def test_a_callback_stops_a_run_without_an_error_and_the_run_is_resumed(here: Path):
    write(
        f"{NOTES}\nfrom dockyard import StopRun\nclass C:\n    def after_rollout(self, rollout):\n"
        "        note('rollout')\n        raise StopRun('seen one')\n"
    )
    words = ["--grpo.group_size=2", "--rollout.concurrency=1", '--callbacks=["my_callbacks:C"]', "--num-tasks=2"]
    command = [sys.executable, "-m", "dockyard", "rollout"]
    done = subprocess.run([*command, *DEMO, *words, "--json"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"stopped by a callback: seen one; `dockyard rollout --resume {here / 'mine'}` continues" in done.stderr
    assert done.stdout == "null\n"  # there is no summary yet
    assert len(calls()) == 1
    assert 1 <= len(Path("mine/rollouts/rollouts.jsonl").read_text().splitlines()) < 4
    assert main(["rollout", "--resume=mine", "--callbacks=[]"]) == 0
    assert len(Path("mine/rollouts/rollouts.jsonl").read_text().splitlines()) == 4
    assert dockyard.load_run("mine").summary is not None
