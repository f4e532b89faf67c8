"""The checkpoints of a run: one folder per saved step, complete or absent, and a copy of the best adapter so far."""

import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dockyard.errors import DockyardError
from dockyard.run_dir.durable import remove_folder, whole_folder

_BEST, _SCORE = "best", "score.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    path: Path


class HeldoutScore(BaseModel):
    """The mean reward on held-out tasks after a number of steps."""

    model_config = ConfigDict(frozen=True)

    step: int
    reward: float


class Checkpoints:
    """The folder that holds the checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def new(self, step: int) -> Generator[Path]:
        """Yield a folder to fill. It becomes the checkpoint of this step unless the block raises."""
        with whole_folder(self._folder / f"step-{step:05}") as draft:
            yield draft

    def all(self) -> list[Checkpoint]:
        """List the checkpoints by step."""
        names = ((path, re.fullmatch(r"step-(\d+)", path.name)) for path in self._folder.glob("step-*"))
        found = [Checkpoint(step=int(match[1]), path=path) for path, match in names if match]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint | None:
        """Return the checkpoint to resume from."""
        return max(self.all(), key=lambda checkpoint: checkpoint.step, default=None)

    def keep_last(self, count: int) -> None:
        """Delete all but the last `count` checkpoints; 0 keeps all."""
        for checkpoint in self.all()[:-count] if count else ():
            remove_folder(checkpoint.path)

    @property
    def best_path(self) -> Path:
        """The folder of the best adapter and its score. A run cannot be resumed from it."""
        return self._folder / _BEST

    def best(self) -> HeldoutScore | None:
        """Return the score of the best adapter so far, or None if there is none."""
        file = self.best_path / _SCORE
        try:
            return HeldoutScore.model_validate_json(file.read_bytes()) if file.exists() else None
        except ValidationError as error:
            raise DockyardError(f"`{file}` is not a score", hint=f"remove `{self.best_path}`, then resume") from error

    def keep_best(self, adapter: Path, score: HeldoutScore) -> bool:
        """Copy this adapter if its reward is higher than that of the best so far. Return whether it was copied."""
        best = self.best()
        if best and score.reward <= best.reward:
            return False
        with whole_folder(self.best_path) as draft:
            shutil.copytree(adapter, draft, dirs_exist_ok=True)
            (draft / _SCORE).write_text(score.model_dump_json(indent=2) + "\n")
        return True
