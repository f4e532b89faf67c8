"""Decide whether a run folder may be continued: by which verb, with which settings and versions, by one process.

The kernel releases the lock when its process ends. The lock file is never removed: that would let two processes hold
locks on two files of the same name.
"""

import fcntl
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dockyard.config import OnResume, RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.settings.text import changed_keys, settings_by_key

type SplitName = Literal["heldout", "train"]


class CheckPurpose(BaseModel):
    """What a check of tasks is to find out, and where its results go besides the run's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    """Of the tasks' content: records of other tasks would say nothing about these."""
    difficulty: int | None = None
    """How often a policy attempts each good task. None: never."""
    report: Path | None = None
    keep: Path | None = None
    """Where the good tasks are copied to."""


class Purpose(BaseModel):
    """As the command line has it; none of it is a setting of the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    verb: Literal["train", "rollout", "eval", "tasks check", "backend slime", "backend prime-rl"]
    split: SplitName = "heldout"
    """Whose tasks an evaluation attempts."""
    adapter: Path | None = None
    """What an evaluation evaluates besides the base model."""
    num_tasks: int | None = None
    """How many tasks rollouts are made of. None: all."""
    harbor_cli: bool = False
    """Whether rollouts are made by `harbor run` commands."""
    check: CheckPurpose | None = None
    """Of `tasks check` only."""


def load_purpose(file: Path) -> Purpose:
    """What was written when the run began. A folder without a word of it is a training run."""
    if not file.exists():
        return Purpose(verb="train")
    try:
        return Purpose.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise DockyardError(f"`{file}` cannot be read: {error.errors()[0]['msg']}", hint="begin another run") from error


def resumable_keys() -> frozenset[str]:
    """The settings that may differ when a run is resumed. Each is marked in `config.py`."""
    fields = settings_by_key(RunConfig).items()
    return frozenset(key for key, field in fields if OnResume.MAY_CHANGE in field.metadata)


def refuse_fixed(old: RunConfig, new: RunConfig) -> None:
    """Raise an error if a setting differs that a resumed run must keep."""
    # With a linear schedule, the learning rate of the updates to be replayed depends on the number of steps.
    changeable = resumable_keys() - ({"steps"} if old.trainer.schedule == "linear" else set())
    fixed = [key for key in changed_keys(old, new) if key not in changeable]
    if fixed:
        names = ", ".join(f"`{key}`" for key in fixed)
        of_backends = ("slime.", "prime_rl.")
        others = ", ".join(f"`{key}`" for key in sorted(changeable - {"run_dir"}) if not key.startswith(of_backends))
        raise UsageError(f"{names} cannot change in a run that has begun", hint=f"these can: {others}")


_PACKAGES = ("dockyard", "harbor", "torch", "transformers", "peft", "tokenizers", "numpy")


def versions() -> dict[str, str | None]:
    """Versions by name, None for what is not installed. Imports none of them."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{package: _version(package) for package in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def take_lock(path: Path) -> int:
    """Lock the file and return its descriptor; closing that releases the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise DockyardError(
            f"`{path.parent}` is in use by process {holder or '(unknown)'}",
            hint="wait for it or stop it, or choose another `--run_dir`",
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
