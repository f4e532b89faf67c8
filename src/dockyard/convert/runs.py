"""Our own run folders: what the gateway recorded is exact, and stays so."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from dockyard.convert.conversation import Converted
from dockyard.convert.exchanges import conversations_of
from dockyard.convert.guard import blank, guarded
from dockyard.convert.tokens import Tokeniser, skip
from dockyard.errors import DockyardError
from dockyard.run_dir import recorded_files, settings_file
from dockyard.run_dir.records import RecordedRollout, from_line

_EVALUATIONS = "eval"


def is_run(path: Path) -> bool:
    """Is this the folder of a run?"""
    return recorded_files(path) is not None


def read_run(path: Path, tokeniser: Tokeniser) -> Iterator[Converted]:
    """The rollouts of all phases. Those of evaluations are no training data unless their file is named."""
    files = recorded_files(path)
    if not files:
        raise DockyardError(f"`{path}` has no rollouts", hint=f"`dockyard convert {path / 'trials'}` reads its trials")
    for file in files:
        for found in read_recorded(file, tokeniser):
            is_evaluation = file.stem.startswith(_EVALUATIONS) and found.skipped != "unreadable"
            detail = f"held-out tasks are not trained on; `dockyard convert {file}` converts them"
            yield skip(found, "evaluation", detail) if is_evaluation else found


def read_recorded(file: Path, tokeniser: Tokeniser) -> Iterator[Converted]:
    """One file of rollouts, line by line. Of an attempt that was recorded twice, the later counts."""
    who = _Who.of(settings_file(file.parent.parent))
    latest = {key: number for number, line in _lines(file) if (key := _key(line))}
    for number, line in _lines(file):
        key = _key(line)
        if key is None or latest[key] == number:
            where = f"{file} line {number}"
            unknown = blank(where, agent=who.agent, model=who.model)
            yield guarded(unknown, partial(_converted, where, line, who, tokeniser))


@dataclass(frozen=True, slots=True)
class _Who:
    agent: str = ""
    model: str = ""

    @classmethod
    def of(cls, config: Path) -> "_Who":
        """Nobody, if the settings cannot be read: the rollouts can be."""
        try:
            settings = tomllib.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls()
        return cls(_name(settings, "agent"), _name(settings, "model"))


def _name(settings: dict[str, Any], section: str) -> str:
    named: object = settings.get(section)
    return str(cast("dict[str, Any]", named).get("name") or "") if isinstance(named, dict) else ""


class _Key(BaseModel, frozen=True):
    group: int
    task: str
    attempt: int


def _key(line: bytes) -> _Key | None:
    try:
        return _Key.model_validate_json(line)
    except ValidationError:
        return None


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Whole lines; what follows the last line break is being written."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                yield number, line


def _converted(where: str, line: bytes, who: _Who, tokeniser: Tokeniser) -> Converted:
    try:
        recorded = from_line(line)
        conversations = conversations_of(recorded.rollout.exchanges)
    except (ValidationError, KeyError, TypeError, OverflowError) as error:
        broken = blank(where, agent=who.agent, model=who.model)
        return skip(broken, "unreadable", f"`{where}` is no rollout: {str(error).splitlines()[0]}")
    rollout = recorded.rollout
    found = Converted(
        where=where,
        trial=_trial_name(recorded),
        agent=who.agent,
        model=who.model,
        rollout=rollout,
        group=f"{recorded.phase}-{recorded.group:03}",
        conversations=conversations,
        detail="the run recorded ids, not text; its `trials` folder has the agent's words" if rollout.segments else "",
    )
    if rollout.failure and rollout.reward is None:
        return skip(found, "no_reward", f"{rollout.failure.cause}: {rollout.failure.message}")
    if not rollout.segments and not conversations:
        return skip(found, "no_model_calls", "the policy was not asked, or nothing it said reached the agent")
    return tokeniser.give(found, text=recorded.transcript)


def _trial_name(recorded: RecordedRollout) -> str:
    return f"{recorded.phase}-{recorded.group:03}-{recorded.rollout.attempt:02}"
