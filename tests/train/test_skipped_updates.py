"""Gradients that are not finite: one is skipped, several in a row stop the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from dockyard.config import RunConfig, TrainerConfig
from dockyard.errors import DockyardError
from dockyard.run_dir.run import RunDir
from dockyard.trainer.display import TrainingProgress
from dockyard.trainer.loop import Learner
from dockyard.trainer.record import StepRecord
from dockyard.types import Group, Rollout

GROUPS = (
    Group(
        task="t",
        rollouts=(Rollout(task="t", kind="", attempt=0, segments=(), reward=1.0, failure=None),),
    ),
)


@dataclass
class FakeLearner:
    async def checkpoint(self) -> None: ...


async def no_evaluation(version: int) -> dict[str, float]:
    return {}


def no_tracker(step: int, numbers: Mapping[str, float]) -> None: ...


def record_of(run: RunDir) -> StepRecord:
    return StepRecord(run, TrainingProgress(9), cast(Learner, FakeLearner()), no_evaluation, no_tracker)


async def record(run: RunDir, first: int, skipped: list[float | None]) -> None:
    """One step for each: whether its update was skipped, None where there was nothing to learn."""
    steps = record_of(run)
    for step, value in enumerate(skipped, start=first):
        numbers = {"train/tokens": 5.0, "time/update_s": 1.0} | ({} if value is None else {"train/skipped": value})
        await steps.record(step, GROUPS, numbers)


async def test_as_many_skipped_updates_in_a_row_as_allowed_stop_the_run(tmp_path: Path):
    with RunDir.create(tmp_path / "run", RunConfig()) as run:
        await record(run, 0, [1.0, 1.0, 0.0, 1.0, 1.0])
        with pytest.raises(DockyardError, match="the last 3 updates were not finite") as caught:
            await record(run, 5, [1.0])
        assert "`--trainer.max_skipped_steps`" in (caught.value.hint or "")
        assert len(run.read_metrics()) == 6


async def test_a_step_without_an_update_neither_counts_nor_breaks_the_row(tmp_path: Path):
    config = RunConfig(trainer=TrainerConfig(max_skipped_steps=2))
    with RunDir.create(tmp_path / "run", config) as run:
        await record(run, 0, [1.0, None])
        with pytest.raises(DockyardError, match="the last 2 updates"):
            await record(run, 2, [1.0])
