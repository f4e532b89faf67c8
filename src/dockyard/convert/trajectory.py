"""Turn the ATIF trajectories that one agent left into histories: what the model was told and said, in order.

A trajectory may hold several histories: subagents have their own, a summary replaces what came before it, and a file
may continue in another. Copied steps are context, because they were said in another history.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from dockyard.convert import atif
from dockyard.convert.atif import AtifStep, Content, Result, Trajectory, UnreadableError, read_trajectory, text_of
from dockyard.convert.conversation import Conversation
from dockyard.rollout.details import stored_turn
from dockyard.types import ASSISTANT, Json, Message, ToolCall, Turn

_ASIDES = ("compaction", "branch_summary")
"""Summaries that pi writes among its steps: sampled, but not after the steps before them."""

_OPENHANDS = "openhands"


@dataclass(slots=True, eq=False)
class History:
    """One history as it grows."""

    tools: tuple[Json, ...] = ()
    name: str = ""
    messages: list[Message] = field(default_factory=list[Message])
    sampled: set[int] = field(default_factory=set[int])
    cut: set[int] = field(default_factory=set[int])
    turns: list[Turn] = field(default_factory=list[Turn])
    """Of the model's messages those whose tokens were kept."""

    def conversation(self) -> Conversation:
        return Conversation(
            messages=tuple(self.messages),
            tools=self.tools,
            sampled=frozenset(self.sampled),
            cut=frozenset(self.cut),
            name=self.name,
        )

    def goes_on_from(self, other: Self) -> bool:
        """Does it tell all that the other does, as its own?"""
        same = self.messages[: len(other.messages)] == other.messages
        return same and other.sampled <= self.sampled and self.tools == other.tools


class HistoryBuilder:
    """Tells the steps of one trajectory, whoever takes them, into histories."""

    def __init__(self, trajectory: Trajectory, name: str, notes: set[str]) -> None:
        self._trajectory = trajectory
        self._name = name
        self._notes = notes
        self._is_terminus = trajectory.agent.name.startswith(atif.NAME)

    def tell(
        self, before: History | None = None, questions: "dict[int, list[AtifStep]] | None" = None
    ) -> list[History]:
        """One for each history, the main one first. `before` goes on here; `questions` are those asked at a step."""
        told: list[History] = []
        for lane, steps in self._lanes().items():
            goes_on = before if before and not lane and not steps[0].is_copied_context else None
            told += self._tell_lane(steps, goes_on or self._begin(lane), questions or {})
        return told

    def _lanes(self) -> dict[str, list[AtifStep]]:
        """claude-code writes the steps of its subagents between its own."""
        lanes: dict[str, list[AtifStep]] = {}
        for step in self._trajectory.steps:
            lane = str(step.says("agent_id") or "sidechain") if step.says("is_sidechain") else ""
            lanes.setdefault(lane, []).append(step)
        return lanes

    def _begin(self, lane: str = "") -> History:
        return History(tools=self._trajectory.tools(), name="/".join(part for part in (self._name, lane) if part))

    def _tell_lane(
        self, steps: list[AtifStep], history: History, questions: dict[int, list[AtifStep]]
    ) -> list[History]:
        told = [history]
        for step in steps:
            if step.replaces_context:
                told.append(self._after_summary(told[-1], questions.get(id(step), [])))
            else:
                self.add(told[-1], step)
        return told

    def _after_summary(self, history: History, questions: Sequence[AtifStep]) -> History:
        """What is left of a history when the rest was summarised: how it began, and what terminus-2 asked itself."""
        fresh = History(tools=history.tools, name=history.name)
        num_opening = next((i for i, message in enumerate(history.messages) if message.role != "system"), 0)
        fresh.messages += history.messages[: num_opening + 1 if self._is_terminus else num_opening]
        for step in questions:
            self.add(fresh, step, is_context=True)
        if self._is_terminus and not questions:
            self._notes.add("summary_missing")
        return fresh

    def add(self, history: History, step: AtifStep, *, is_context: bool = False) -> None:
        """The messages of one step."""
        if _has_media(step):
            self._notes.add("media_left_out")
        if step.source == "agent":
            self._add_reply(history, step, is_context=is_context)
            return
        if text := text_of(step.message):
            history.messages.append(Message(step.source, text))
        history.messages += [Message("user", text) for result in step.results if (text := text_of(result.content))]

    def _add_reply(self, history: History, step: AtifStep, *, is_context: bool) -> None:
        message = self._reply(step)
        if message.text or message.calls or message.reasoning:
            if not is_context and _is_own(step):
                self._note_own(history, step)
            history.messages.append(message)
        else:
            self._notes.add("empty_replies")
        answers = _answers(step.results, message.calls)
        history.messages += answers

    def _note_own(self, history: History, step: AtifStep) -> None:
        place, metrics = len(history.messages), step.metrics
        history.sampled.add(place)
        if step.says("stop_reason") == "max_tokens":
            history.cut.add(place)
        if (step.llm_call_count or 1) > 1:
            self._notes.add("merged_replies")
        if metrics and metrics.prompt_token_ids and metrics.completion_token_ids:
            turn = stored_turn(metrics.prompt_token_ids, metrics.completion_token_ids, metrics.logprobs)
            history.turns.append(turn)

    def _reply(self, step: AtifStep) -> Message:
        text = text_of(step.message)
        reasoning = step.reasoning_content or ""
        if self._is_terminus:
            whole = atif.reply_of(step, self._trajectory.agent)
            if whole is not None:
                self._notes.add("rebuilt_replies")
            return Message(ASSISTANT, text if whole is None else whole, reasoning)
        calls = tuple(call.call() for call in step.tool_calls or ())
        if calls and self._trajectory.agent.name == _OPENHANDS:
            self._notes.add("paraphrased_replies")
        # mini-swe-agent's converter gives the text a second time, as if it had been thought.
        return Message(ASSISTANT, text, "" if reasoning == text else reasoning, calls)


def _is_own(step: AtifStep) -> bool:
    """Did the model say it here?"""
    return not step.is_copied_context and step.llm_call_count != 0 and step.says("pi_event_type") not in _ASIDES


def _answers(results: Sequence[Result], calls: Sequence[ToolCall]) -> list[Message]:
    """Tool messages where results belong to calls; what belongs to none is said by the user."""
    open_ids = [call.id for call in calls]
    tools: list[Message] = []
    others: list[Message] = []
    for result in results:
        text, call_id = text_of(result.content), result.source_call_id
        if call_id is None and open_ids:  # mini-swe-agent names no call; its results come in the order of the calls
            call_id = open_ids[0]
        if call_id in open_ids:
            open_ids.remove(call_id)
            tools.append(Message("tool", text, call_id=call_id))
        elif text:
            others.append(Message("user", text))
    return tools + others


def _has_media(step: AtifStep) -> bool:
    contents: list[Content] = [step.message, *(result.content for result in step.results)]
    return any(isinstance(content, list) and any(part.type != "text" for part in content) for content in contents)


TRAJECTORY = "trajectory.json"
_KEEP_SYSTEM_BACK = ("claude-code", "qwen-code")
"""Agents with long system texts that their trajectories do not have."""
_LEFT_OVER = ("trajectory.cont-*.json", "trajectory.summarization-*.json")
"""Of terminus-2, when it was stopped before it could refer to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryText:
    """What the model was told and said in one trial."""

    conversations: tuple[Conversation, ...]
    turns: tuple[tuple[Turn, ...], ...] = ()
    """Of each conversation those of the model's messages whose tokens were kept."""
    model: str = ""
    notes: frozenset[str] = frozenset()

    @classmethod
    def joined(cls, parts: "Iterable[TrajectoryText]") -> "TrajectoryText":
        """One after the other, as the steps of a task are."""
        told = list(parts)
        return cls(
            conversations=tuple(conversation for part in told for conversation in part.conversations),
            turns=tuple(turns for part in told for turns in part.turns),
            model=next((part.model for part in told if part.model), ""),
            notes=frozenset(note for part in told for note in part.notes),
        )


def read_told(*files: Path) -> TrajectoryText:
    """From the trajectories of a trial, one for each of its steps. Raises `UnreadableError`, or FileNotFoundError."""
    readers = [_Reader(file) for file in files]
    histories = _without_repeats([history for reader in readers for history in reader.histories])
    own = [history for history in histories if history.sampled]
    notes = {note for reader in readers for note in reader.notes}
    if any(message.calls for history in own for message in history.messages if not history.tools):
        notes.add("no_tool_definitions")
    if any(reader.agent in _KEEP_SYSTEM_BACK for reader in readers) and not any(map(_has_system, own)):
        notes.add("no_system_prompt")
    return TrajectoryText(
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
        told = HistoryBuilder(trajectory, name, self.notes).tell(before, self._questions(trajectory))
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

    def _questions(self, trajectory: Trajectory) -> dict[int, list[AtifStep]]:
        """What terminus-2 asked itself when it made a summary, by the step that says so: it stays in the history."""
        found: dict[int, list[AtifStep]] = {}
        for step in trajectory.steps:
            paths = [ref.trajectory_path or "" for result in step.results for ref in result.references()]
            asked = [path for path in paths if step.replaces_context and path.endswith("-questions.json")]
            for path in asked:
                if questions := self._load(self._place(path)):
                    found[id(step)] = questions.steps
        return found


__all__ = ["TRAJECTORY", "TrajectoryText", "UnreadableError", "read_told"]
