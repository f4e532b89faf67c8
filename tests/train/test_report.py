from pathlib import Path

import pytest

from dockyard.config import RunConfig
from dockyard.run_dir.run import EVAL_AFTER, EVAL_BEFORE, RunDir, step_phase
from dockyard.trainer.report import RunSummary, chart, draw_curve, report
from dockyard.types import Blame, Failure, Rollout

EVALUATION = """\
held-out reward, 4 tasks, with a 95 % interval
           before             after
long-kind  0.50               1.00
x          0.00               1.00
all        0.25 [0.01, 0.81]  1.00 [0.40, 1.00]
"""
LOST = Failure(cause="engine_failed", blame=Blame.INFRASTRUCTURE, message="")


def rollout(task: str, kind: str, reward: float | None, failure: Failure | None = None) -> Rollout:
    return Rollout(task=task, kind=kind, attempt=0, segments=(), reward=reward, failure=failure)


def test_the_summary_and_the_report_say_what_happened(tmp_path: Path):
    with RunDir.create(tmp_path / "run", RunConfig(steps=2)) as run:
        for step in range(2):
            run.write_rollout(step_phase(step), rollout("t", "x", None, LOST))
            run.record_metrics(step, {"reward/mean": 0.1 + step / 2})
        for task, kind, reward in (("a", "x", 0), ("b", "x", 0), ("c", "long-kind", 0), ("d", "long-kind", 1)):
            run.write_rollout(EVAL_BEFORE, rollout(task, kind, reward), transcript="I do not know.")
            run.write_rollout(EVAL_AFTER, rollout(task, kind, 1.0), transcript="echo hi")
        summary = RunSummary.of(run, wall_s=60.0)
        run.write_summary(summary.json())
        assert run.read_summary() == {
            "eval_before": 0.25,
            "eval_before_low": pytest.approx(0.0063, abs=1e-4),
            "eval_before_high": pytest.approx(0.8059, abs=1e-4),
            "eval_before_kinds": {"long-kind": 0.5, "x": 0.0},
            "eval_after": 1.0,
            "eval_after_low": pytest.approx(0.3976, abs=1e-4),
            "eval_after_high": 1.0,
            "eval_after_kinds": {"long-kind": 1.0, "x": 1.0},
            "eval_during": {},
            "eval_tasks": 4,
            "steps": 2,
            "seed": 0,
            "method": "lora",
            "rewards": [0.1, 0.6],
            "rollouts": 10,
            "sampled_tokens": 0,
            "failures": {"engine_failed": 2},
            "gateway": {},
            "wall_s": 60.0,
        }
        text = report(run, summary)
        draw_curve(summary, run.paths.curve)
    assert EVALUATION in text
    assert "I do not know." in text
    assert "echo hi" in text
    assert "engine_failed 2" in text
    assert run.paths.curve.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_an_evaluation_has_a_report_too(tmp_path: Path):
    with RunDir.create(tmp_path / "run", RunConfig(steps=0)) as run:
        summary = RunSummary.of(run, wall_s=1.0)
        draw_curve(summary, run.paths.curve)
        assert summary.before is None
        assert summary.json()["eval_before_kinds"] is None
        assert "0 rollouts" in report(run, summary)


def test_the_chart_rises_with_the_reward():
    rows = chart([0.0, 0.5, 1.0]).splitlines()
    assert rows[1] == "1.00 │      ███"
    assert rows[4] == "0.50 │   ██████"
    assert rows[6].startswith("0.17 │   ███")
