from pathlib import Path

import pytest

from dockyard.config import RunConfig
from dockyard.run_dir import EVAL_AFTER, EVAL_BEFORE, RunDir, step_phase
from dockyard.trainer.report import chart, draw_curve, report, score, summarise
from dockyard.types import Blame, Failure, Rollout

LOST = Failure(cause="engine_failed", blame=Blame.INFRASTRUCTURE, message="")


def rollout(task: str, kind: str, reward: float | None, failure: Failure | None = None) -> Rollout:
    return Rollout(task=task, kind=kind, attempt=0, segments=(), reward=reward, failure=failure)


def test_kinds_count_alike_however_many_tasks_they_have():
    found = score([rollout("a", "x", 1.0), rollout("b", "x", 0.0), rollout("c", "x", 0.5), rollout("d", "y", 0.0)])
    assert found is not None
    assert found.kinds == {"x": 0.5, "y": 0.0}
    assert found.mean == 0.25
    assert found.tasks == 4
    assert found.error == pytest.approx(1.96 * (0.25 / 3) ** 0.5 / 2)  # the variance of 1, 0, 0.5 is 0.25


def test_lost_rollouts_are_no_score():
    assert score([rollout("a", "x", None, LOST)]) is None
    found = score([rollout("a", "x", None, LOST), rollout("b", "x", 1.0)])
    assert found is not None
    assert found.mean == 1.0


def test_the_summary_and_the_report_say_what_happened(tmp_path: Path):
    with RunDir.create(tmp_path / "run", RunConfig(steps=2)) as run:
        for step in range(2):
            run.write_rollout(step_phase(step), rollout("t", "x", None, LOST))
            run.record_metrics(step, {"reward/mean": 0.1 + step / 2})
        run.write_rollout(EVAL_BEFORE, rollout("h", "x", 0.2), transcript="I do not know.")
        run.write_rollout(EVAL_AFTER, rollout("h", "x", 0.9), transcript="echo hi")
        summary = summarise(run, wall_s=60.0)
        assert run.read_summary() == summary
        assert {key: summary[key] for key in ("eval_before", "eval_after", "eval_tasks", "steps", "rollouts")} == {
            "eval_before": 0.2,
            "eval_after": 0.9,
            "eval_tasks": 1,
            "steps": 2,
            "rollouts": 4,
        }
        assert summary["failures"] == {"engine_failed": 2}
        text = report(run, summary)
        draw_curve(summary, run.curve)
    assert "mean        0.20     0.90" in text
    assert "I do not know." in text
    assert "echo hi" in text
    assert "engine_failed 2" in text
    assert run.curve.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_an_evaluation_has_a_report_too(tmp_path: Path):
    with RunDir.create(tmp_path / "run", RunConfig(steps=0)) as run:
        summary = summarise(run, wall_s=1.0)
        draw_curve(summary, run.curve)
        assert summary["eval_before"] is None
        assert "0 rollouts" in report(run, summary)


def test_the_chart_rises_with_the_reward():
    rows = chart([0.0, 0.5, 1.0]).splitlines()
    assert rows[1] == "1.00 │      ███"
    assert rows[4] == "0.50 │   ██████"
    assert rows[6].startswith("0.17 │   ███")
