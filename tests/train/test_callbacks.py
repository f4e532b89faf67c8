"""Callbacks in real training runs of a tiny model, with the class of `examples/extend/hooks.py` and one that stops."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killable_runs import GROUP_SIZE, TASKS_PER_STEP, settings, write_tasks

import dockyard
from dockyard.errors import UsageError

EXAMPLE = Path(__file__).parents[2] / "examples/extend/hooks.py"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("hooks", "counting", "stopping"):
        sys.modules.pop(name, None)


def lines(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def test_the_example_shows_the_worst_rollout_of_each_step_and_logs_each_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copy(EXAMPLE, tmp_path)
    write_tasks(tmp_path / "heldout", 2)
    (tmp_path / "heldout/task-0/tests/test.sh").write_text("echo 0 > /logs/verifier/reward.txt\n")
    (tmp_path / "heldout/task-1/tests/test.sh").write_text("echo 0.5 > /logs/verifier/reward.txt\n")
    config = settings(tmp_path, steps=2) | {
        "tasks.heldout": "heldout",
        "eval.every": 1,
        "callbacks": ["hooks:Hooks"],
        "rollout.max_staleness": 1,
    }
    run = dockyard.train(config, run_dir="mine")
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ") and "worst" in line]
    rollouts = run.rollouts(as_="arrow").to_pylist()
    for step, line in enumerate(shown):
        rewards = [row["reward"] for row in rollouts if row["step"] == step]
        assert line.startswith(f"step {step}: worst rollout task-")
        assert f"reward {min(rewards)}, " in line
    assert len(shown) == 2
    assert [(line["version"], line["reward"]) for line in lines("evaluations.jsonl")] == [
        (0, 0.25),
        (1, 0.25),
        (2, 0.25),
    ]


def test_the_example_stops_when_held_out_tasks_are_solved(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    shutil.copy(EXAMPLE, tmp_path)
    write_tasks(tmp_path / "heldout", 1)
    (tmp_path / "heldout/task-0/tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    config = settings(tmp_path, steps=2) | {"tasks.heldout": "heldout", "callbacks": ["hooks:Hooks"]}
    run = dockyard.train(config, run_dir="mine")
    assert run.metrics(as_="arrow").num_rows == 0
    assert "stopped by a callback: the held-out reward of version 0 is 1.00; `dockyard train --resume" in caplog.text


COUNTING = """
import json
from dockyard import StopRun

class C:
    def after_rollout(self, rollout):
        self._note("rollout")
    def after_group(self, group):
        self._note("group")
    def after_step(self, step, metrics):
        self._note("step", step=step, reward=metrics["reward/mean"])
        if step == 1:
            raise StopRun("two steps are enough")
    def _note(self, what, **more):
        with open("calls.jsonl", "a") as file:
            file.write(json.dumps({"what": what, **more}) + "\\n")
"""


def test_a_run_that_a_callback_stops_has_a_summary_and_continues_without_repeated_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "counting.py").write_text(COUNTING)
    config = settings(tmp_path, steps=3) | {"callbacks": ["counting:C"], "trainer.save_every": 3}
    run = dockyard.train(config, run_dir="mine")
    assert run.metrics(as_="arrow")["step"].to_pylist() == [0, 1]
    assert run.adapter == tmp_path / "mine/adapters/v00002"
    shown = capsys.readouterr().err
    assert "stopped after 2 of 3 steps" in shown
    assert f"adapter:      {run.adapter}\n" in shown
    assert run.summary is not None
    assert len(run.summary["rewards"]) == 2
    step = ["rollout"] * TASKS_PER_STEP * GROUP_SIZE + ["group"] * TASKS_PER_STEP
    assert sorted(line["what"] for line in lines("calls.jsonl")) == sorted([*step, "step"] * 2)
    rewards = run.metrics(as_="arrow")["reward/mean"].to_pylist()
    assert [line["reward"] for line in lines("calls.jsonl") if line["what"] == "step"] == rewards

    Path("calls.jsonl").unlink()
    again = dockyard.train(resume=run.path)  # replays two steps, which were recorded and not saved
    assert again.metrics(as_="arrow")["step"].to_pylist() == [0, 1, 2]
    calls = lines("calls.jsonl")
    assert sorted(line["what"] for line in calls) == sorted([*step, "step"])
    assert (calls[-1]["what"], calls[-1]["step"]) == ("step", 2)


def test_a_wrong_signature_is_an_error_before_the_first_rollout(tmp_path: Path):
    (tmp_path / "stopping.py").write_text("class C:\n    def after_group(self): ...\n")
    with pytest.raises(UsageError) as raised:
        dockyard.train(settings(tmp_path, steps=1), callbacks=["stopping:C"], run_dir="mine")
    assert raised.value.hint == "define `def after_group(self, group: Group) -> None`"
    assert not (tmp_path / "mine/rollouts").exists()
