"""The run on disk, and the only file that builds paths inside it. Every finished rollout survives `kill -9`.

config.toml  purpose.json  versions.json  metrics.jsonl  summary.json  reward.png  split.json  run.lock  run.id
task-list.json  backend/  trackers/  engine.log
rollouts/step-00003.jsonl  rollouts/eval-{00003,before,after}.jsonl  rollouts/{rollouts,eval}.jsonl
checkpoints/step-00010/  checkpoints/best/  adapters/v00010/  trials/  tasks/
"""

import json
import logging
import math
import os
import shutil
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Any, Self, cast

from pydantic import ValidationError
from pydantic_core import to_json

from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.checkpoints import Checkpoint, Checkpoints, HeldoutScore
from dockyard.run_dir.durable import (
    append_line,
    disk_errors,
    make_folder,
    read_lines,
    remove_drafts,
    write_atomically,
)
from dockyard.run_dir.records import RecordedRollout, eval_of, eval_phase, from_line, step_of, step_phase, to_line
from dockyard.run_dir.resume import Purpose, load_purpose, refuse_fixed, take_lock, versions
from dockyard.settings.load import anchored, load_run_config
from dockyard.settings.overrides import Overrides, Patch, read_overrides
from dockyard.settings.text import to_toml
from dockyard.types import Rollout

__all__ = [
    "EVAL",
    "EVAL_AFTER",
    "EVAL_BEFORE",
    "ROLLOUTS",
    "Checkpoint",
    "Checkpoints",
    "HeldoutScore",
    "Purpose",
    "RecordedRollout",
    "RunDir",
    "checkpoints_of",
    "eval_phase",
    "read_purpose",
    "recorded_files",
    "resumed_config",
    "settings_file",
    "step_phase",
    "task_list_file",
    "trials_folder",
]

logger = logging.getLogger(__name__)

EVAL_BEFORE, EVAL_AFTER = "eval-before", "eval-after"
ROLLOUTS, EVAL = "rollouts", "eval"
"""The one phase of a run that only makes rollouts, and of an evaluation."""
_PHASES = (EVAL_BEFORE, EVAL_AFTER, ROLLOUTS, EVAL)  # besides the steps

_LOCK, _CONFIG, _PURPOSE, _VERSIONS, _METRICS, _SUMMARY, _CURVE, _CRASH = (
    "run.lock",
    "config.toml",
    "purpose.json",
    "versions.json",
    "metrics.jsonl",
    "summary.json",
    "reward.png",
    "crash.txt",
)
_ROLLOUTS, _CHECKPOINTS, _ADAPTERS, _TRIALS, _TASKS = "rollouts", "checkpoints", "adapters", "trials", "tasks"
_FOLDERS = (_ROLLOUTS, _CHECKPOINTS, _ADAPTERS, _TRIALS, _TASKS)
# In the order in which `--overwrite` removes them: a folder holds a run as long as its settings are there.
_ID, _SPLIT, _TRACKERS, _TASK_LIST, _BACKEND = "run.id", "split.json", "trackers", "task-list.json", "backend"
_ENGINE_LOG = "engine.log"
_BESIDE = (_TRACKERS, _ID, _SPLIT, _TASK_LIST, _BACKEND, _ENGINE_LOG)
_OURS = (*_FOLDERS, *_BESIDE, _VERSIONS, _METRICS, _SUMMARY, _CURVE, _CRASH, _PURPOSE, _CONFIG)


class RunDir:
    """A run folder held by this process until `close`."""

    def __init__(self, path: Path, config: RunConfig, lock: int) -> None:
        self.path = path.absolute()
        self.config = config
        self._lock = lock
        self._writing = threading.Lock()  # rollouts may be recorded from several threads
        for folder in (self.path, *(self.path / name for name in _FOLDERS)):
            folder.mkdir(exist_ok=True)
            if lock >= 0:
                remove_drafts(folder)

    @classmethod
    def create(cls, path: Path, config: RunConfig, *, overwrite: bool = False, purpose: Purpose | None = None) -> Self:
        """Begin a run, by default to train. One that is already there is removed only when `overwrite` says so."""
        settings = to_toml(anchored(config)).encode()
        with disk_errors(path):
            lock = _take_fresh(path, overwrite=overwrite)
        try:
            with disk_errors(path):
                write_atomically(path / _PURPOSE, (purpose or Purpose(verb="train")).model_dump_json().encode())
                write_atomically(path / _CONFIG, settings)
                run = cls(path, config, lock)
                write_atomically(run.path / _VERSIONS, to_json(versions(), indent=2))
        except BaseException:
            os.close(lock)
            raise
        return run

    @classmethod
    def resume(cls, path: Path, overrides: Sequence[str] | Overrides = ()) -> Self:
        """Continue a run with its own settings; `overrides` may change what its records do not depend on."""
        config = resumed_config(path, overrides)
        with disk_errors(path):
            lock = take_lock(path / _LOCK)
        try:
            run = cls(path, config, lock)
            run._accept_steps(before=load_run_config(path / _CONFIG, []).steps)
            write_atomically(path / _CONFIG, to_toml(anchored(config)).encode())
            run._warn_of_other_versions()
        except BaseException:
            os.close(lock)
            raise
        return run

    @classmethod
    def join(cls, path: Path) -> Self:
        """A run that another process holds, as long as this one works for it."""
        return cls(path, load_run_config(path / _CONFIG, []), lock=-1)

    def discard(self) -> None:
        """Remove the run if nothing has come of it yet, so that the same command can be given again.

        What the engine said stays: it may be why.
        """
        if not any(path for name in (_ROLLOUTS, _TRIALS, _CHECKPOINTS) for path in (self.path / name).iterdir()):
            _delete_run(self.path, but=_ENGINE_LOG)

    def close(self) -> None:
        """Let other processes use the folder. The lock is gone after the first call."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # The command line hides tracebacks; one of a mistake of ours must not be lost with a long run.
        if isinstance(error, Exception) and not isinstance(error, DockyardError):
            with suppress(OSError):  # the error itself matters more
                (self.path / _CRASH).write_text("".join(traceback.format_exception(error)))
        self.close()

    @property
    def id(self) -> str:
        """A name that no other folder's run has, nor a copy of this one: what bears it is this run's to remove."""
        file = self.path / _ID
        if not file.exists():
            write_atomically(file, token_hex(16).encode())
        return blake2b(file.read_bytes() + bytes(self.path.resolve()), digest_size=6).hexdigest()

    @property
    def trackers(self) -> Path:
        """Where W&B and TensorBoard keep their files."""
        folder = self.path / _TRACKERS
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def tracker_id(self) -> str:
        """What trackers call this run, also after it was resumed or moved."""
        file = self.trackers / "id"
        if not file.exists():
            write_atomically(file, token_hex(4).encode())
        return file.read_text()

    @property
    def trials(self) -> Path:
        """Where Harbor keeps its files of each rollout."""
        return trials_folder(self.path)

    @property
    def tasks(self) -> Path:
        """Where generated tasks are kept."""
        return self.path / _TASKS

    @property
    def split_file(self) -> Path:
        """Which tasks are trained on and which are held out, where the run drew them."""
        return self.path / _SPLIT

    @property
    def task_list(self) -> Path:
        """The run's tasks, for those of its processes that did not find them."""
        return task_list_file(self.path)

    @property
    def backend(self) -> Path:
        """Where another engine that owns the loop has its files. The caller makes the folder."""
        return backend_dir(self.path)

    @property
    def engine_log(self) -> Path:
        """What a server that the run starts for itself says."""
        return self.path / _ENGINE_LOG

    @property
    def curve(self) -> Path:
        """The picture of the reward curve."""
        return self.path / _CURVE

    def adapter_dir(self, version: int) -> Path:
        """Where the adapter of a weight version is published. The caller makes the folder."""
        return self.path / _ADAPTERS / f"v{version:05}"

    def publish_adapter(self, version: int, save: Callable[[Path], None]) -> Path:
        """Have the adapter of this version written to its folder."""
        folder = self.adapter_dir(version)
        with disk_errors(folder):
            save(folder)
        return folder

    def keep_adapters(self, oldest: int) -> None:
        """Remove the published adapters of older versions; checkpoints have their own."""
        for folder in (self.path / _ADAPTERS).iterdir():
            if folder.name < self.adapter_dir(max(oldest, 0)).name:
                shutil.rmtree(folder)

    def write_rollout(self, phase: str, rollout: Rollout, *, group: int = 0, transcript: str = "") -> None:
        """Record a finished rollout. It is on disk when this returns."""
        recorded = RecordedRollout(phase=phase, group=group, rollout=rollout, transcript=transcript)
        line = to_line(recorded)
        with self._writing:
            append_line(self.rollouts_file(phase), line)

    def read_rollouts(self, phase: str) -> list[RecordedRollout]:
        """The rollouts of a phase as recorded. Of an attempt that was recorded twice, the later counts."""
        file = self.rollouts_file(phase)
        found: dict[tuple[int, str, int], RecordedRollout] = {}
        for number, line in enumerate(read_lines(file), start=1):
            try:
                recorded = from_line(line)
            except ValidationError as error:
                raise DockyardError(
                    f"`{file}` line {number} is not a rollout", hint="remove that line, then resume"
                ) from error
            found[recorded.group, recorded.rollout.task, recorded.rollout.attempt] = recorded
        return list(found.values())

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step's numbers under `area/name` keys. Lines of this step and later ones, left by a crash, go."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        line = json.dumps({"step": step, **finite}).encode()
        with self._writing:
            lines = read_lines(self.path / _METRICS)
            kept = [old for old in lines if json.loads(old)["step"] < step]
            if len(kept) < len(lines):
                write_atomically(self.path / _METRICS, b"".join(old + b"\n" for old in kept))
            append_line(self.path / _METRICS, line)

    def read_metrics(self) -> list[dict[str, float | None]]:
        """One object per step; what was not a finite number is None."""
        return [json.loads(line) for line in read_lines(self.path / _METRICS)]

    @property
    def checkpoints(self) -> Checkpoints:
        return checkpoints_of(self.path)

    @contextmanager
    def new_checkpoint(self, step: int) -> Generator[Path]:
        """A folder to fill. It becomes the checkpoint of this step when the block ends well, else it never was."""
        with self.checkpoints.new(step) as draft:
            yield draft

    def latest_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to resume from."""
        return self.checkpoints.latest()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """What the run came to. Replaces the one before."""
        write_atomically(self.path / _SUMMARY, to_json(summary, indent=2, inf_nan_mode="null"))

    def read_summary(self) -> dict[str, Any] | None:
        """The summary, None before the first."""
        file = self.path / _SUMMARY
        return json.loads(file.read_bytes()) if file.exists() else None

    def rollouts_file(self, phase: str) -> Path:
        """Where the rollouts of a phase are recorded, one JSON object a line."""
        step, version = step_of(phase), eval_of(phase)
        if step is not None:
            known = (step_phase(step),)
        else:
            known = _PHASES if version is None else (eval_phase(version),)
        if phase not in known:
            raise ValueError(f"`{phase}` is not a phase of a run")
        return self.path / _ROLLOUTS / f"{phase}.jsonl"

    def _accept_steps(self, before: int) -> None:
        """An evaluation after the former last step says nothing about the new one."""
        if self.config.counts_passes:
            return
        steps, made = self.config.steps, self.latest_checkpoint()
        if made and made.step > steps:
            raise UsageError(f"`steps` is {steps}, but this run has made {made.step}", hint=f"`--steps {made.step}`")
        if steps != before:
            self.rollouts_file(EVAL_AFTER).unlink(missing_ok=True)

    def _warn_of_other_versions(self) -> None:
        file = self.path / _VERSIONS
        recorded = cast(dict[str, str | None], json.loads(file.read_bytes())) if file.exists() else {}
        now = versions()
        for name, was in recorded.items():
            if now.get(name) != was:
                logger.warning("the run began with %s %s; now it is %s", name, was, now.get(name))


def _take_fresh(path: Path, *, overwrite: bool) -> int:
    """Lock a folder that holds no run, or no longer does."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"`{path}` is a file, not a folder", hint="choose another `--run_dir`")
    make_folder(path, hint="choose another `--run_dir`")
    in_the_way = [name for name in _OURS if (path / name).exists()]
    # Only a folder with our lock file is a run: somebody's own `tasks` and `config.toml` are never ours to remove.
    if in_the_way and not (path / _LOCK).exists():
        names = ", ".join(f"`{name}`" for name in in_the_way)
        raise UsageError(f"`{path}` is not a run, but holds {names}", hint="choose another `--run_dir`")
    lock = take_lock(path / _LOCK)
    if not (path / _CONFIG).exists():
        return lock
    if not overwrite:
        os.close(lock)
        raise UsageError(
            f"`{path}` already holds a run",
            hint=f"`--resume {path}` continues it, `--run_dir DIR` begins another, `--overwrite` deletes it first",
        )
    logger.warning("deleting the run in %s", path)
    _delete_run(path)
    return lock


def _delete_run(path: Path, *, but: str | None = None) -> None:
    for name in _OURS:
        inside = path / name
        if name == but:
            continue
        if inside.is_dir() and not inside.is_symlink():
            shutil.rmtree(inside)
        else:
            inside.unlink(missing_ok=True)


def checkpoints_of(path: Path) -> Checkpoints:
    """Those of the run in this folder, which another process may hold."""
    return Checkpoints(path / _CHECKPOINTS)


def settings_file(path: Path) -> Path:
    """Where a run has its settings."""
    return path / _CONFIG


def trials_folder(path: Path) -> Path:
    """Where Harbor keeps its files of the rollouts of the run in this folder."""
    return path / _TRIALS


def task_list_file(path: Path) -> Path:
    """Where a run has the list of its tasks."""
    return path / _TASK_LIST


def backend_dir(path: Path) -> Path:
    """Where a run has what belongs to another engine."""
    return path / _BACKEND


def recorded_files(path: Path) -> list[Path] | None:
    """The files of rollouts of the run in this folder, which another process may hold; None if it is no run."""
    if not (path / _CONFIG).is_file() or not (path / _ROLLOUTS).is_dir():
        return None
    return sorted((path / _ROLLOUTS).glob("*.jsonl"))


def read_purpose(path: Path) -> Purpose | None:
    """What the run in this folder was begun for; None if there is none."""
    return load_purpose(path / _PURPOSE) if (path / _CONFIG).is_file() else None


def resumed_config(path: Path, overrides: Sequence[str] | Overrides) -> RunConfig:
    """The settings a resumed run would have."""
    if not (path / _CONFIG).is_file():
        raise UsageError(f"`{path}` holds no run", hint="`dockyard train RUN.toml` begins one")
    here = Patch({"run_dir": path}, "--resume")  # the folder may have been moved
    old = load_run_config(path / _CONFIG, Overrides((here,)))
    new = load_run_config(path / _CONFIG, read_overrides(RunConfig, overrides).after(here))
    refuse_fixed(old, new)
    return new
