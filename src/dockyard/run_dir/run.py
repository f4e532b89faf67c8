"""A run folder as its process uses it: create or resume it, record results, and read them back.

Every finished rollout survives `kill -9`. `RunPaths` describes the layout of the folder.
"""

import json
import logging
import math
import os
import shutil
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Annotated, Any, Self, cast

from pydantic import AfterValidator, TypeAdapter, ValidationError
from pydantic_core import to_json

from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.checkpoints import Checkpoint, Checkpoints, HeldoutScore
from dockyard.run_dir.claim import claim_folder, delete_run, remove_if_empty, take_lock
from dockyard.run_dir.durable import append_line, disk_errors, read_lines, remove_drafts, write_atomically
from dockyard.run_dir.paths import EVAL, EVAL_AFTER, EVAL_BEFORE, ROLLOUTS, RunPaths, eval_phase, step_phase
from dockyard.run_dir.records import RecordedRollout, from_line, to_line
from dockyard.run_dir.resume import Purpose, load_purpose, refuse_fixed, versions
from dockyard.settings.load import SettingsFile, anchored, load_run_config
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
    "ResumedRun",
    "RunDir",
    "RunPaths",
    "eval_phase",
    "read_metrics",
    "read_purpose",
    "read_recorded",
    "read_summary",
    "recorded_files",
    "step_phase",
]

logger = logging.getLogger(__name__)


def _with_step(metrics: dict[str, int | float | None]) -> dict[str, int | float | None]:
    if not isinstance(metrics.get("step"), int):
        raise ValueError("it has no `step`")
    return metrics


_METRICS = TypeAdapter(Annotated[dict[str, int | float | None], AfterValidator(_with_step)])
_SUMMARY = TypeAdapter(dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRun:
    """The settings with which a run continues, read once from its folder."""

    path: Path
    recorded: RunConfig
    """The settings in the folder."""
    config: RunConfig
    """The same settings with the changes made on resume."""

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str] | Overrides = ()) -> Self:
        """Read the settings. Raise UsageError if `overrides` change what recorded results depend on."""
        file = RunPaths(path).config
        if not file.is_file():
            raise UsageError(f"`{path}` holds no run", hint="`dockyard train RUN.toml` starts one")
        settings = SettingsFile.read(file)
        here = Patch({"run_dir": path}, "--resume")  # the folder may have been moved
        recorded = load_run_config(settings, Overrides((here,)))
        changes = read_overrides(RunConfig, overrides)
        if changes == Overrides():
            return cls(path=path, recorded=recorded, config=recorded)
        config = load_run_config(settings, changes.after(here))
        refuse_fixed(recorded, config)
        return cls(path=path, recorded=recorded, config=config)


class RunDir:
    """A run folder that this process holds until `close`."""

    def __init__(self, path: Path, config: RunConfig, lock: int) -> None:
        self.path = path.absolute()
        self.paths = RunPaths(self.path)
        self.config = config
        self._lock = lock
        self._writing = threading.Lock()  # rollouts may be recorded from several threads
        for folder in (self.path, *self.paths.folders):
            folder.mkdir(exist_ok=True)
            if lock >= 0:
                remove_drafts(folder)

    @classmethod
    def create(cls, path: Path, config: RunConfig, *, overwrite: bool = False, purpose: Purpose | None = None) -> Self:
        """Start a run, by default a training run. `overwrite` deletes a run that is already in the folder."""
        paths, settings = RunPaths(path), to_toml(anchored(config)).encode()
        with disk_errors(path):
            lock = claim_folder(paths, overwrite=overwrite)
        try:
            with disk_errors(path):
                write_atomically(paths.purpose, (purpose or Purpose(verb="train")).model_dump_json().encode())
                write_atomically(paths.config, settings)
                run = cls(path, config, lock)
                write_atomically(paths.versions, to_json(versions(), indent=2))
        except BaseException:
            os.close(lock)
            raise
        return run

    @classmethod
    def resume(cls, path: Path, overrides: Sequence[str] | Overrides = ()) -> Self:
        """Continue a run with its own settings. `overrides` may change what recorded results do not depend on."""
        return cls.reopen(ResumedRun.read(path, overrides))

    @classmethod
    def reopen(cls, resumed: ResumedRun) -> Self:
        """Continue a run whose settings have been read."""
        paths = RunPaths(resumed.path)
        with disk_errors(resumed.path):
            lock = take_lock(paths.lock)
        try:
            run = cls(resumed.path, resumed.config, lock)
            run._accept_steps(before=resumed.recorded.steps)
            write_atomically(paths.config, to_toml(anchored(resumed.config)).encode())
            run._warn_of_other_versions()
        except BaseException:
            os.close(lock)
            raise
        return run

    @classmethod
    def join(cls, path: Path) -> Self:
        """Use a run that another process holds, for a worker of that process."""
        return cls(path, load_run_config(RunPaths(path).config, []), lock=-1)

    def discard(self) -> None:
        """Delete the run if it has no results yet, so that the same command can be repeated.

        The engine's log is kept, because it may explain the failure.
        """
        paths = self.paths
        if not any(path for folder in (paths.rollouts, paths.trials, paths.checkpoints) for path in folder.iterdir()):
            delete_run(paths, keep=[paths.engine_log])
            remove_if_empty(paths)

    def close(self) -> None:
        """Release the folder for other processes. Further calls have no effect."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # The command line shows no tracebacks. Keep that of an unexpected error.
        if isinstance(error, Exception) and not isinstance(error, DockyardError):
            with suppress(OSError):  # the error itself matters more
                self.paths.crash.write_text("".join(traceback.format_exception(error)))
        self.close()

    @property
    def id(self) -> str:
        """An ID that no other run has, not even a copy of this folder. It labels containers that belong to this run."""
        file = self.paths.id
        if not file.exists():
            write_atomically(file, token_hex(16).encode())
        return blake2b(file.read_bytes() + bytes(self.path.resolve()), digest_size=6).hexdigest()

    @property
    def tracker_id(self) -> str:
        """The ID of this run in trackers. It stays the same when the run is resumed or moved."""
        file = self.paths.tracker_id
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, token_hex(4).encode())
        return file.read_text()

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.paths.checkpoints)

    def publish_adapter(self, version: int, save: Callable[[Path], None]) -> Path:
        """Call `save` with the folder of this weight version, and return the folder."""
        folder = self.paths.adapter(version)
        with disk_errors(folder):
            save(folder)
        return folder

    def keep_adapters(self, oldest: int) -> None:
        """Delete the published weights of versions before `oldest`. Checkpoints keep their own copies."""
        for folder in self.paths.adapters.iterdir():
            if folder.name < self.paths.adapter(max(oldest, 0)).name:
                shutil.rmtree(folder)

    def write_rollout(self, phase: str, rollout: Rollout, *, group: int = 0, transcript: str = "") -> None:
        """Record a finished rollout. It is on disk when this returns."""
        recorded = RecordedRollout(phase=phase, group=group, rollout=rollout, transcript=transcript)
        line = to_line(recorded)
        with self._writing:
            append_line(self.paths.rollouts_of(phase), line)

    def read_rollouts(self, phase: str) -> list[RecordedRollout]:
        """Read the rollouts of a phase."""
        return read_recorded(self.paths.rollouts_of(phase))

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step under `area/name` keys, replacing those of this step and later ones."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        line = json.dumps({"step": step, **finite}).encode()
        file = self.paths.metrics
        with self._writing:
            lines = read_lines(file)
            steps = [recorded["step"] or 0 for recorded in read_metrics(self.paths)]
            kept = [old for old, made in zip(lines, steps, strict=True) if made < step]
            if len(kept) < len(lines):  # a crash may have left later ones
                write_atomically(file, b"".join(old + b"\n" for old in kept))
            append_line(file, line)

    def read_metrics(self) -> list[dict[str, float | None]]:
        """Read the metrics of each step. A value that was not finite is None."""
        return read_metrics(self.paths)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the results of the run, replacing earlier ones."""
        write_atomically(self.paths.summary, to_json(summary, indent=2, inf_nan_mode="null"))

    def read_summary(self) -> dict[str, Any] | None:
        """Read the results of the run, or None if there are none yet."""
        return read_summary(self.paths)

    def _accept_steps(self, before: int) -> None:
        """Refuse fewer steps than were made. If `steps` changed, delete the evaluation after the former last step."""
        if self.config.counts_passes:
            return
        steps, made = self.config.steps, self.checkpoints.latest()
        if made and made.step > steps:
            raise UsageError(f"`steps` is {steps}, but this run has made {made.step}", hint=f"`--steps {made.step}`")
        if steps != before:
            self.paths.rollouts_of(EVAL_AFTER).unlink(missing_ok=True)

    def _warn_of_other_versions(self) -> None:
        file = self.paths.versions
        recorded = cast(dict[str, str | None], json.loads(file.read_bytes())) if file.exists() else {}
        now = versions()
        for name, was in recorded.items():
            if now.get(name) != was:
                logger.warning("the run was started with %s %s; now it is %s", name, was, now.get(name))


def read_recorded(file: Path) -> list[RecordedRollout]:
    """Read a file of rollouts. If an attempt was recorded twice, the later record counts."""
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


def read_metrics(paths: RunPaths) -> list[dict[str, float | None]]:
    """Read the metrics of each step of a run. A value that was not finite is None."""
    return [_metrics_of(line, f"`{paths.metrics}` line {n}") for n, line in enumerate(read_lines(paths.metrics), 1)]


def _metrics_of(line: bytes, place: str) -> dict[str, float | None]:
    try:
        return _METRICS.validate_json(line)
    except ValidationError as error:
        raise DockyardError(
            f"{place} is not the metrics of a step: {_first_problem(error)}",
            hint="remove that line; the table then has no row for its step",
        ) from error


def read_summary(paths: RunPaths) -> dict[str, Any] | None:
    """Read the results of a run, or None if there are none yet."""
    if not paths.summary.exists():
        return None
    try:
        return _SUMMARY.validate_json(paths.summary.read_bytes())
    except ValidationError as error:
        raise DockyardError(
            f"`{paths.summary}` is not the summary of a run: {_first_problem(error)}",
            hint="delete the file and resume the run, which writes it again",
        ) from error


def _first_problem(error: ValidationError) -> str:
    details = error.errors(include_url=False)[0]
    place = f"`{details['loc'][0]}`: " if details["loc"] else ""
    return f"{place}{details['msg'].removeprefix('Value error, ')}"


def recorded_files(path: Path) -> list[Path] | None:
    """List the files of rollouts of a run, which another process may hold. None if the folder is not a run."""
    paths = RunPaths(path)
    if not paths.config.is_file() or not paths.rollouts.is_dir():
        return None
    return sorted(paths.rollouts.glob("*.jsonl"))


def read_purpose(path: Path) -> Purpose | None:
    """Read which command started the run in this folder. None if the folder holds no run."""
    paths = RunPaths(path)
    return load_purpose(paths.purpose) if paths.config.is_file() else None
