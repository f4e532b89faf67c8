"""All that one agent left of what was said: its trajectory, the files it goes on in, its subagents, its summaries."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dockyard.convert.atif import Step, Trajectory, UnreadableError, read_trajectory
from dockyard.convert.conversation import Conversation
from dockyard.convert.histories import History, Narrator
from dockyard.rollout.details import KeptTurn

TRAJECTORY = "trajectory.json"
_KEEP_SYSTEM_BACK = ("claude-code", "qwen-code")
"""Agents with long system texts that their trajectories do not have."""
_LEFT_OVER = ("trajectory.cont-*.json", "trajectory.summarization-*.json")
"""Of terminus-2, when it was stopped before it could refer to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the model was told and said in one trial."""

    conversations: tuple[Conversation, ...]
    turns: tuple[tuple[KeptTurn, ...], ...] = ()
    """Of each conversation those of the model's messages whose tokens were kept."""
    model: str = ""
    notes: frozenset[str] = frozenset()

    @classmethod
    def joined(cls, parts: "Iterable[Told]") -> "Told":
        """One after the other, as the steps of a task are."""
        told = list(parts)
        return cls(
            conversations=tuple(conversation for part in told for conversation in part.conversations),
            turns=tuple(turns for part in told for turns in part.turns),
            model=next((part.model for part in told if part.model), ""),
            notes=frozenset(note for part in told for note in part.notes),
        )


def read_told(*files: Path) -> Told:
    """From the trajectories of a trial, one for each of its steps. Raises `UnreadableError`, or FileNotFoundError."""
    readers = [_Reader(file) for file in files]
    histories = _without_repeats([history for reader in readers for history in reader.histories])
    own = [history for history in histories if history.sampled]
    notes = {note for reader in readers for note in reader.notes}
    if any(message.calls for history in own for message in history.messages if not history.tools):
        notes.add("no_tool_definitions")
    if any(reader.agent in _KEEP_SYSTEM_BACK for reader in readers) and not any(map(_has_system, own)):
        notes.add("no_system_prompt")
    return Told(
        conversations=tuple(history.conversation() for history in own),
        turns=tuple(tuple(history.turns) for history in own),
        model=next((reader.model for reader in readers if reader.model), ""),
        notes=frozenset(notes),
    )


def _has_system(history: History) -> bool:
    return any(message.role == "system" for message in history.messages)


def _without_repeats(histories: list[History]) -> list[History]:
    """A later step of a task may tell the earlier ones again."""
    return [
        history
        for number, history in enumerate(histories)
        if not any(later.goes_on_from(history) for later in histories[number + 1 :])
    ]


class _Reader:
    """One trajectory file with those it leads to."""

    def __init__(self, file: Path) -> None:
        self.notes: set[str] = set()
        self.histories: list[History] = []
        self.model, self.agent = "", ""
        self._folder = file.parent
        self._read: set[Path] = set()
        self._follow(file)
        if file.name == TRAJECTORY:
            for pattern in _LEFT_OVER:
                for left in sorted(self._folder.glob(pattern)):
                    self._add_file(left.name)

    def _follow(self, file: Path) -> None:
        """A file and those that it goes on in."""
        self._read.add(file.resolve())
        trajectory, history = read_trajectory(file), None
        while trajectory is not None:
            self.model = self.model or trajectory.agent.model_name or ""
            self.agent = self.agent or trajectory.agent.name
            history = self._add(trajectory, "", history)
            after = trajectory.continued_trajectory_ref
            trajectory = self._find(after) if after else None

    def _add(self, trajectory: Trajectory, name: str, before: History | None = None) -> History | None:
        """Its own histories, then those of its subagents. The last of its own, which may go on elsewhere."""
        told = Narrator(trajectory, name, self.notes).tell(before, self._questions(trajectory))
        self.histories += [history for history in told if history is not before]
        for subagent in trajectory.subagent_trajectories or ():
            self._add(subagent, subagent.trajectory_id or subagent.agent.name or "subagent")
        embedded = {subagent.trajectory_id for subagent in trajectory.subagent_trajectories or ()} - {None}
        for reference in trajectory.references():
            if reference.trajectory_path and reference.trajectory_id not in embedded:
                self._add_file(reference.trajectory_path)
        return next((history for history in reversed(told) if history.name == name), before)

    def _add_file(self, name: str) -> None:
        if trajectory := self._find(name):
            self._add(trajectory, Path(name).stem.removeprefix("trajectory."))

    def _find(self, name: str) -> Trajectory | None:
        """A file that another refers to, unless it was read before."""
        file = self._place(name)
        if file in self._read:
            return None
        if file is not None:
            self._read.add(file)
        return self._load(file)

    def _place(self, name: str) -> Path | None:
        """Nothing outside the agent's folder is read."""
        try:
            file = (self._folder / name).resolve()
            return file if file.is_relative_to(self._folder.resolve()) and file.is_file() else None
        except (OSError, ValueError):  # too long for a name, or a zero byte in it
            return None

    def _load(self, file: Path | None) -> Trajectory | None:
        if file is None:
            self.notes.add("file_missing")
            return None
        try:
            return read_trajectory(file)
        except (UnreadableError, OSError):
            self.notes.add("file_unreadable")
            return None

    def _questions(self, trajectory: Trajectory) -> dict[int, list[Step]]:
        """What terminus-2 asked itself when it made a summary, by the step that says so: it stays in the history."""
        found: dict[int, list[Step]] = {}
        for step in trajectory.steps:
            paths = [ref.trajectory_path or "" for result in step.results for ref in result.references()]
            asked = [path for path in paths if step.replaces_context and path.endswith("-questions.json")]
            for path in asked:
                if questions := self._load(self._place(path)):
                    found[id(step)] = questions.steps
        return found


__all__ = ["TRAJECTORY", "Told", "UnreadableError", "read_told"]
