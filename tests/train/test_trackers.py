"""The real trackers, none of which needs a network: what they logged is read back from their own files."""

import json
import logging
import os
import sqlite3
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dockyard.config import AgentConfig, RunConfig, TasksConfig, TrackerConfig
from dockyard.errors import UsageError
from dockyard.run_dir.run import RunDir
from dockyard.trainer.trackers import Trackers, check_trackers, open_trackers

STEPS: list[dict[str, float]] = [
    {"reward/mean": 0.25, "train/loss": 1.5, "train/kl": float("nan")},
    {"reward/mean": 0.5, "train/loss": 0.5, "train/kl": 0.125},
]
SECRET = "sk-of-an-agent"
TOLD = [
    {"reward/mean": 0.25, "train/loss": 1.5},
    {"reward/mean": 0.5, "train/loss": 0.5, "train/kl": 0.125},
]


def config_with(tracker: TrackerConfig) -> RunConfig:
    agent = AgentConfig(env={"KEY": SECRET}, kwargs={"token": SECRET})
    return RunConfig(tasks=TasksConfig(source="demo"), agent=agent, tracker=tracker, seed=17)


def train(run: RunDir, steps: range) -> None:
    """What a run reports: to its records first, then to trackers."""
    with open_trackers(run.config, run) as trackers:
        for step in steps:
            run.record_metrics(step, STEPS[step])
            trackers.log(step, STEPS[step])
        trackers.conclude({"eval_after": 0.75, "rewards": [0.25, 0.5], "eval_before": None})


def train_killed_and_resumed(path: Path, tracker: TrackerConfig) -> None:
    """After a kill the first step is replayed before the second is made."""
    with RunDir.create(path, config_with(tracker)) as run:
        train(run, range(1))
    with RunDir.resume(path) as run:
        train(run, range(2))


def test_tensorboard_reads_every_step_once_under_the_names_of_the_metrics_file(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_killed_and_resumed(tmp_path / "run", TrackerConfig(tensorboard=True))
    events = EventAccumulator(str(tmp_path / "run/trackers/tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["reward/mean", "train/kl", "train/loss"]
    told = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert told == [(0, 1.5), (1, 0.5)]


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import wandb

    wandb.teardown()  # what another test's settings have left
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "600")  # for its service process to start; only against hanging
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    yield
    wandb.teardown()  # ends its service process


def wandb_records(file: Path) -> Iterator[object]:
    """W&B's own file: a header of 7 bytes, then blocks of 32 KB with records that may go on in the next block."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # no room for another header
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def wandb_history(file: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for record in wandb_records(file):
        if record.HasField("history"):  # pyright: ignore[reportAttributeAccessIssue]
            items = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item  # pyright: ignore[reportAttributeAccessIssue]
            }
            found[items["_step"]] = {name: value for name, value in items.items() if not name.startswith("_")}
    return found


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_offline_holds_every_step_of_one_run_and_no_secret(tmp_path: Path):
    import wandb

    check_trackers(TrackerConfig(wandb="project"))
    train_killed_and_resumed(tmp_path / "run", TrackerConfig(wandb="project"))
    wandb.teardown()  # its service has written everything only when it has ended, as it does with the run's process
    files = sorted((tmp_path / "run/trackers/wandb").glob("offline-run-*/run-*.wandb"))
    run_id = (tmp_path / "run/trackers/id").read_text()
    assert {file.stem for file in files} == {f"run-{run_id}"}  # the same run, before and after
    told = {step: numbers for file in files for step, numbers in wandb_history(file).items()}
    assert told == dict(enumerate(TOLD))
    everything = b"".join(file.read_bytes() for file in (tmp_path / "run/trackers").rglob("*") if file.is_file())
    assert b"shell" in everything  # the settings are there
    assert b"0.75" in everything  # and what the run came to
    assert SECRET.encode() not in everything


@pytest.mark.parametrize(("key", "message"), [(None, "there is no W&B key"), ("short", "W&B rejects the key")])
@pytest.mark.usefixtures("wandb_offline")
def test_wandb_without_a_key_is_an_error_before_the_first_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, message: str
):
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(UsageError, match=message) as caught:
        check_trackers(TrackerConfig(wandb="project"))
    assert "WANDB_API_KEY" in caught.value.hint


def test_trackio_holds_every_step_of_one_run_and_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train_killed_and_resumed(tmp_path / "run", TrackerConfig(trackio="project"))
    database = sqlite3.connect(Path(os.environ["TRACKIO_DIR"], "project.db"))
    rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    [settings] = {row[0] for row in database.execute("SELECT config FROM configs").fetchall()}
    database.close()
    assert {name for name, _, _ in rows} == {f"run-{(tmp_path / 'run/trackers/id').read_text()}"}
    assert [(step, json.loads(metrics)) for _, step, metrics in rows] == list(enumerate(TOLD))
    assert json.loads(settings)["seed"] == 17
    assert SECRET not in str(settings)
    assert capsys.readouterr().out == ""  # which is for data


class Broken:
    """Implements `Tracker`: fails at a given step."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.told: list[int] = []

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step >= self.at:
            raise ConnectionError("gone")
        self.told.append(step)

    def finish(self, summary: Mapping[str, float], *, failed: bool) -> None:
        self.told.append(-1)


def test_a_tracker_that_fails_warns_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture):
    broken, healthy = Broken(at=1), Broken(at=99)

    def never() -> Broken:
        raise TimeoutError("no answer")

    with caplog.at_level(logging.WARNING):
        trackers = Trackers({"mute": never, "broken": lambda: broken, "healthy": lambda: healthy})
        for step in range(4):
            trackers.log(step, {"train/loss": 1.0})
        trackers.close(failed=False)
    assert broken.told == [0]
    assert healthy.told == [0, 1, 2, 3, -1]
    assert [record.getMessage() for record in caplog.records] == [
        "mute failed, the run continues without it: TimeoutError: no answer",
        "broken failed, the run continues without it: ConnectionError: gone",
    ]


def test_a_missing_package_is_an_error_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    for name in ("wandb", "tensorboard", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    for tracker in (TrackerConfig(wandb="p"), TrackerConfig(tensorboard=True), TrackerConfig(trackio="p")):
        with pytest.raises(UsageError, match="is not installed") as caught:
            check_trackers(tracker)
        assert "pip install 'dockyard[trackers]'" in caught.value.hint
    check_trackers(TrackerConfig())
