"""A real run whose rollouts go on while the policy learns: no token is older than allowed, and some are old."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_policy import tiny_model_dir
from trials import write_task

from dockyard.cli import main
from dockyard.run_dir.run import RunDir, step_phase
from dockyard.trainer import learner as learners
from dockyard.trainer import record
from dockyard.trainer.heldout import Heldout
from dockyard.types import Group

# A random model solves nothing, so the reward is the length of what it said, modulo 7: every group has a difference.
TEST_SH = 'echo "$(( $(wc -c < /app/reply.txt) % 7 ))" > /logs/verifier/reward.txt\n'
STEPS = 4

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("default")]


def settings(folder: Path, max_staleness: int) -> list[str]:
    for index in range(3):
        write_task(folder / "tasks" / f"task-{index}", TEST_SH)
    values = {
        "run_dir": folder / "run",
        "steps": STEPS,
        "model.name": tiny_model_dir(),
        "model.device": "cpu",
        "tasks.train": folder / "tasks",
        "agent.name": "reply_agent:ReplyAgent",
        "sampling.max_new_tokens": 24,
        "rollout.concurrency": 4,
        "rollout.max_staleness": max_staleness,
        "grpo.group_size": 4,
        "grpo.tasks_per_step": 2,
        "trainer.lr": 0.01,
    }
    return [f"--{key}={value}" for key, value in values.items()]


def ages(folder: Path) -> dict[int, set[int]]:
    """How many updates old the weights behind the tokens of each step were."""
    found: dict[int, set[int]] = {}
    with RunDir.resume(folder / "run") as run:
        for step in range(STEPS):
            rollouts = [item.rollout for item in run.read_rollouts(step_phase(step))]
            assert len(rollouts) == 8
            segments = [segment for rollout in rollouts for segment in rollout.segments]
            versions = [segment.versions[segment.sampled] for segment in segments if segment.versions is not None]
            found[step] = {step - int(version) for drawn in versions for version in drawn}
    return found


@pytest.fixture
def late_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy does not learn before a rollout of the next step is there, however slow rollouts are."""
    update = learners.LocalLearner.update

    async def wait_and_update(learner: learners.LocalLearner, groups: tuple[Group, ...]) -> dict[str, float]:
        early = learner.run.paths.rollouts_of(step_phase(learner.version + 1))
        while learner.config.rollout.max_staleness and learner.version + 1 < STEPS and not early.exists():
            await asyncio.sleep(0.01)
        return await update(learner, groups)

    monkeypatch.setattr(learners.LocalLearner, "update", wait_and_update)


@pytest.mark.usefixtures("late_updates")
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_no_token_is_older_than_allowed_and_some_are_old(tmp_path: Path, max_staleness: int):
    assert main(["train", *settings(tmp_path, max_staleness)]) == 0
    seen = set().union(*ages(tmp_path).values())
    assert seen <= set(range(max_staleness + 1))
    assert (max(seen) > 0) == (max_staleness > 0)
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(line["rollout/staleness"] <= max_staleness for line in metrics)
    assert (max(line["rollout/staleness"] for line in metrics) > 0) == (max_staleness > 0)


def test_recorded_rollouts_are_not_taken_for_fresher_than_they_are(tmp_path: Path):
    assert main(["train", *settings(tmp_path, 1)]) == 0
    assert main(["train", f"--resume={tmp_path / 'run'}", "--rollout.max_staleness=0"]) == 2


def test_the_evaluation_before_training_is_no_part_of_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hours_s = 0.0
    before = Heldout.before

    async def takes_hours(heldout: Heldout) -> None:
        nonlocal hours_s
        await before(heldout)
        hours_s = 7200.0

    monkeypatch.setattr(Heldout, "before", takes_hours)
    monkeypatch.setattr(record, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + hours_s))
    assert main(["train", *settings(tmp_path, 0), "--steps=1"]) == 0
    [line] = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert hours_s > 0
    assert line["time/collect_s"] <= line["time/step_s"] < hours_s
