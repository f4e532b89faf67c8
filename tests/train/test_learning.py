"""The demo's own settings on the real model: its short form, and that it learns, but not without a learning rate."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from dockyard.cli import main

pytestmark = pytest.mark.filterwarnings("default")

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def run_demo(folder: Path, *settings: str) -> dict[str, Any]:
    assert main(["train", str(DEMO), f"--run_dir={folder}", *settings]) == 0
    return json.loads((folder / "summary.json").read_text())


def test_a_short_demo_trains_evaluates_and_reports(tmp_path: Path):
    summary = run_demo(tmp_path / "run", "--steps=2", "--grpo.tasks_per_step=2", "--tasks.num_heldout=12")
    assert len(summary["rewards"]) == 2
    assert len(summary["eval_after_kinds"]) >= 4
    assert (summary["eval_tasks"], summary["rollouts"]) == (12, 2 * 2 * 8 + 2 * 12)
    assert summary["wall_s"] > 0
    assert isinstance(summary["failures"], dict)
    assert (tmp_path / "run" / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_half_a_demo_learns(tmp_path: Path):
    summary = run_demo(tmp_path / "run", "--steps=10", "--trainer.schedule=constant", "--seed=2")
    assert summary["eval_tasks"] >= 32
    assert summary["rollouts"] == 10 * 48 + 2 * summary["eval_tasks"]
    assert summary["eval_after"] - summary["eval_before"] > 0.25
    assert summary["eval_after"] > summary["eval_before_high"]
    assert fmean(summary["rewards"][-3:]) > fmean(summary["rewards"][:2]) + 0.2


@pytest.mark.soak
def test_without_a_learning_rate_nothing_is_learned(tmp_path: Path):
    summary = run_demo(tmp_path / "run", "--steps=2", "--trainer.lr=0")
    assert abs(summary["eval_after"] - summary["eval_before"]) < 0.1
    assert summary["eval_after"] < 0.4
