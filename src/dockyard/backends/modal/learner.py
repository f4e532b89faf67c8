"""A learner on another machine.

The run folder on this machine stays authoritative: after a restart, the policy gets its last checkpoint from here, and
the updates since then are replayed from the recorded rollouts.
"""

import logging
import shutil
from base64 import b64decode, b64encode
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from dockyard.engine.relay import Find, Relay, RelayCall, RelayEngine
from dockyard.run_dir.records import from_line, to_line
from dockyard.run_dir.run import RecordedRollout, RunDir, step_phase
from dockyard.trainer.record import is_saved
from dockyard.types import Group, Json, Rollout

logger = logging.getLogger(__name__)

CHUNK = 2**20


class _GoneError(Exception):
    """The policy restarted while its files were read."""


@asynccontextmanager
async def open_remote_learner(
    run: RunDir, find: Find, token: str, *, model: str, patience_s: float
) -> AsyncGenerator["RemoteLearner"]:
    """Open a learner for this run. `model` is the name or folder of the base model on the other machine."""
    learner = RemoteLearner(run, find, token, model=model, patience_s=patience_s)
    try:
        learner.engine = await RelayEngine.open(learner.relay)
        yield learner
    finally:
        await learner.relay.close()


class RemoteLearner:
    """Implements `Learner` by calls to a `LearnerHost`."""

    engine: RelayEngine

    def __init__(self, run: RunDir, find: Find, token: str, *, model: str, patience_s: float) -> None:
        self.relay = Relay(find, token, patience_s=patience_s, on_boot=self._bring_up)
        self._run = run
        self._config = run.config.model_copy(update={"model": run.config.model.model_copy(update={"name": model})})
        """The settings for the other machine, where the model has another name."""
        checkpoint = run.checkpoints.latest()
        self._version = checkpoint.step if checkpoint else 0

    @property
    def version(self) -> int:
        return self._version

    async def update(self, groups: tuple[Group, ...]) -> dict[str, float]:
        answer = await self.relay.call("update", _update(self._version, groups))
        self._version += 1
        return answer["metrics"]

    async def publish(self) -> None:
        """Mark the new version. The host serves it before `update` returns; adapters are written here once saved."""
        await self.engine.publish(Path(), self._version)
        self._publish_saved()

    async def checkpoint(self) -> None:
        """Fetch a checkpoint if one is due."""
        if not is_saved(self._config, self._version):
            return
        while True:
            try:
                with self._run.checkpoints.new(self._version) as folder:
                    await self._fetch(folder)
                break
            except _GoneError:
                logger.warning("the policy restarted while it was saved: saving it again")
        self._run.checkpoints.keep_last(self._config.trainer.keep_last)
        self._publish_saved()

    def _publish_saved(self) -> None:
        checkpoint = self._run.checkpoints.latest()
        if checkpoint is None or checkpoint.step != self._version:
            return

        def copy(folder: Path) -> None:
            folder.mkdir(exist_ok=True)
            for file in checkpoint.path.glob("adapter_*"):
                shutil.copy(file, folder)

        self._run.keep_adapters(self._version)
        self._run.publish_adapter(self._version, copy)

    async def _bring_up(self, call: RelayCall) -> None:
        checkpoint = self._run.checkpoints.latest()
        if checkpoint:
            await _send_folder(call, checkpoint.path)
        step = checkpoint.step if checkpoint else None
        begun = await call("begin", {"config": self._config.model_dump(mode="json"), "checkpoint": step})
        for lost in range(begun["version"], self._version):
            await call("update", _update(lost, recorded_groups(self._run, lost)))

    async def _fetch(self, folder: Path) -> None:
        saved = await self.relay.call("save", {})
        for name, size in saved["files"].items():
            with (folder / name).open("wb") as file:
                while file.tell() < size:
                    wanted = {"ticket": saved["ticket"], "name": name, "offset": file.tell()}
                    part = await self.relay.call("read", wanted)
                    if part["data"] is None:
                        raise _GoneError
                    file.write(b64decode(part["data"]))


async def _send_folder(call: RelayCall, folder: Path) -> None:
    for name, offset, data in _parts(folder):
        await call("write", {"name": name, "offset": offset, "data": b64encode(data).decode()})


def _parts(folder: Path) -> Generator[tuple[str, int, bytes]]:
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            for offset in range(0, max(path.stat().st_size, 1), CHUNK):
                yield path.name, offset, file.read(CHUNK)


def recorded_groups(run: RunDir, step: int) -> tuple[Group, ...]:
    """Return the groups that an earlier step was trained on."""
    found = sorted(run.read_rollouts(step_phase(step)), key=lambda item: (item.group, item.rollout.attempt))
    parts = [tuple(item.rollout for item in items) for _, items in groupby(found, key=lambda item: item.group)]
    return tuple(Group(task=rollouts[0].task, rollouts=rollouts) for rollouts in parts)


def _update(step: int, groups: tuple[Group, ...]) -> Json:
    return {"step": step, "groups": [[_line(step, rollout) for rollout in group.rollouts] for group in groups]}


def _line(step: int, rollout: Rollout) -> str:
    """Serialize a rollout without the fields that training does not use."""
    bare = replace(rollout, untrusted=(), exchanges=())
    return to_line(RecordedRollout(phase=step_phase(step), group=0, rollout=bare)).decode()


def read_groups(body: Json) -> tuple[Group, ...]:
    """Read the groups from the body of an `update` call."""
    groups = [tuple(from_line(line.encode()).rollout for line in lines) for lines in body["groups"]]
    return tuple(Group(task=rollouts[0].task, rollouts=rollouts) for rollouts in groups if rollouts)
