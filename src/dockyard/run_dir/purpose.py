"""What a run folder was begun for. It is continued by the same verb, with the same things."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dockyard.errors import DockyardError

type Split = Literal["heldout", "train"]


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
    split: Split = "heldout"
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
