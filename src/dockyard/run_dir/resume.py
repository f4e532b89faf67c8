"""What a run folder records so that the run can be resumed: the command that started it, and package versions.

`refuse_fixed` checks which settings a resumed run may change.
"""

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
    """The arguments of `dockyard tasks check`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    """Digest of the content of the tasks. A check of changed tasks cannot be resumed."""
    difficulty: int | None = None
    """How often a policy attempts each good task. None if no policy takes part."""
    report: Path | None = None
    """The file to which the report is written, besides the run folder."""
    keep: Path | None = None
    """The folder to which the good tasks are copied."""


class Purpose(BaseModel):
    """The verb that started a run, and those of its arguments that are not settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    verb: Literal["train", "rollout", "eval", "tasks check", "backend slime", "backend prime-rl"]
    split: SplitName = "heldout"
    """Which tasks an evaluation attempts."""
    adapter: Path | None = None
    """The LoRA adapter that is evaluated. None evaluates the base model."""
    num_tasks: int | None = None
    """Number of tasks to attempt. None attempts all."""
    harbor_cli: bool = False
    """Whether rollouts are made by `harbor run` commands."""
    check: CheckPurpose | None = None
    """Only for `tasks check`."""


def load_purpose(file: Path) -> Purpose:
    """Read the purpose of a run. A folder without this file is that of a training run."""
    if not file.exists():
        return Purpose(verb="train")
    try:
        return Purpose.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise DockyardError(f"`{file}` cannot be read: {error.errors()[0]['msg']}", hint="start another run") from error


def resumable_keys() -> frozenset[str]:
    """Return the settings that may differ when a run is resumed. Each is marked in `config.py`."""
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
        raise UsageError(f"{names} cannot change in a run that has started", hint=f"these can: {others}")


_PACKAGES = ("dockyard", "harbor", "torch", "transformers", "peft", "tokenizers", "numpy")


def versions() -> dict[str, str | None]:
    """Return package versions by name, None for packages that are not installed. Imports none of them."""
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
