"""The demo's own settings on the real model, shortened: it learns, and with a learning rate of 0 it does not."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from dockyard.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def run_demo(folder: Path, *settings: str) -> dict[str, Any]:
    assert main(["train", str(DEMO), f"--run_dir={folder}", *settings]) == 0
    return json.loads((folder / "summary.json").read_text())


def test_half_a_demo_learns(tmp_path: Path):
    summary = run_demo(tmp_path / "run", "--steps=10", "--trainer.schedule=constant", "--seed=2")
    assert summary["eval_after"] - summary["eval_before"] > 0.25
    assert summary["eval_after"] > summary["eval_before_high"]
    assert fmean(summary["rewards"][-3:]) > fmean(summary["rewards"][:2]) + 0.2
    assert summary["eval_tasks"] >= 32
    assert len(summary["eval_after_kinds"]) >= 4
    assert summary["rollouts"] == 10 * 48 + 2 * summary["eval_tasks"]
    assert summary["wall_s"] > 0
    assert isinstance(summary["failures"], dict)
    assert (tmp_path / "run" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_learning_rate_nothing_is_learned(tmp_path: Path):
    summary = run_demo(tmp_path / "run", "--steps=2", "--trainer.lr=0")
    assert abs(summary["eval_after"] - summary["eval_before"]) < 0.1
    assert summary["eval_after"] < 0.4
