"""Converts the ATIF trajectories of one agent to histories: the messages to and from the model, in order.

A trajectory may contain several histories: subagents have their own, a summary replaces what came before it, and a file
may continue in another. Copied steps are context, because their replies were sampled in another history.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from dockyard.convert import atif
from dockyard.convert.atif import AtifStep, Content, Result, Trajectory, UnreadableError, read_trajectory, text_of
from dockyard.convert.conversation import Conversation
from dockyard.rollout.job import stored_turn
from dockyard.types import ASSISTANT, Json, Message, ToolCall, Turn

_ASIDES = ("compaction", "branch_summary")
"""Summaries that pi writes between its steps. They were not sampled after the steps before them."""

_OPENHANDS = "openhands"


@dataclass(slots=True, eq=False)
class History:
    """One history, built step by step."""

    tools: tuple[Json, ...] = ()
    name: str = ""
    messages: list[Message] = field(default_factory=list[Message])
    sampled: set[int] = field(default_factory=set[int])
    cut: set[int] = field(default_factory=set[int])
    turns: list[Turn] = field(default_factory=list[Turn])
    """The turns of the model's messages whose tokens are stored."""

    def conversation(self) -> Conversation:
        return Conversation(
            messages=tuple(self.messages),
            tools=self.tools,
            sampled=frozenset(self.sampled),
            cut=frozenset(self.cut),
            name=self.name,
        )

    def continues(self, other: Self) -> bool:
        """Whether it contains all messages of the other, with the same replies sampled."""
        same = self.messages[: len(other.messages)] == other.messages
        return same and other.sampled <= self.sampled and self.tools == other.tools


class HistoryBuilder:
    """Builds the histories of one trajectory, of the agent and of its subagents."""

    def __init__(self, trajectory: Trajectory, name: str, notes: set[str]) -> None:
        self._trajectory = trajectory
        self._name = name
        self._notes = notes
        self._is_terminus = trajectory.agent.name.startswith(atif.NAME)

    def build(
        self, before: History | None = None, questions: "dict[int, list[AtifStep]] | None" = None
    ) -> list[History]:
        """All histories, the main one first. `before` continues here; `questions` are by the id of a summary step."""
        histories: list[History] = []
        for lane, steps in self._lanes().items():
            continued = before if before and not lane and not steps[0].is_copied_context else None
            name = "/".join(part for part in (self._name, lane) if part)
            fresh = History(tools=self._trajectory.tools(), name=name)
            histories += self._build_lane(steps, continued or fresh, questions or {})
        return histories

    def _lanes(self) -> dict[str, list[AtifStep]]:
        """Separate the steps by agent: claude-code writes the steps of its subagents between its own."""
        lanes: dict[str, list[AtifStep]] = {}
        for step in self._trajectory.steps:
            lane = str(step.extra_value("agent_id") or "sidechain") if step.extra_value("is_sidechain") else ""
            lanes.setdefault(lane, []).append(step)
        return lanes

    def _build_lane(
        self, steps: list[AtifStep], history: History, questions: dict[int, list[AtifStep]]
    ) -> list[History]:
        histories = [history]
        for step in steps:
            if step.replaces_context:
                histories.append(self._after_summary(histories[-1], questions.get(id(step), [])))
            else:
                self.add(histories[-1], step)
        return histories

    def _after_summary(self, history: History, questions: Sequence[AtifStep]) -> History:
        """The history after a summary: its opening, and the questions that terminus-2 asked itself."""
        fresh = History(tools=history.tools, name=history.name)
        num_opening = next((i for i, message in enumerate(history.messages) if message.role != "system"), 0)
        fresh.messages += history.messages[: num_opening + 1 if self._is_terminus else num_opening]
        for step in questions:
            self.add(fresh, step, is_context=True)
        if self._is_terminus and not questions:
            self._notes.add("summary_missing")
        return fresh

    def add(self, history: History, step: AtifStep, *, is_context: bool = False) -> None:
        """Add the messages of one step."""
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
        history.messages += _answers(step.results, message.calls)

    def _note_own(self, history: History, step: AtifStep) -> None:
        place, metrics = len(history.messages), step.metrics
        history.sampled.add(place)
        if step.extra_value("stop_reason") == "max_tokens":
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
        # mini-swe-agent's converter repeats the text as reasoning.
        return Message(ASSISTANT, text, "" if reasoning == text else reasoning, calls)


def _is_own(step: AtifStep) -> bool:
    """Whether the reply was sampled in this history."""
    return not step.is_copied_context and step.llm_call_count != 0 and step.extra_value("pi_event_type") not in _ASIDES


def _answers(results: Sequence[Result], calls: Sequence[ToolCall]) -> list[Message]:
    """Tool messages for results that belong to calls, and user messages for the others."""
    open_ids = [call.id for call in calls]
    tools: list[Message] = []
    others: list[Message] = []
    for result in results:
        text, call_id = text_of(result.content), result.source_call_id
        if call_id is None and open_ids:  # mini-swe-agent has no call ids; its results are in the order of the calls
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
_SYSTEM_NOT_STORED = ("claude-code", "qwen-code")
"""Agents with long system texts that their trajectories do not contain."""
_LEFT_OVER = ("trajectory.cont-*.json", "trajectory.summarization-*.json")
"""Files of terminus-2 without a reference, because it was stopped before writing one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryText:
    """The conversations of one trial."""

    conversations: tuple[Conversation, ...]
    turns: tuple[tuple[Turn, ...], ...] = ()
    """For each conversation, the turns whose tokens are stored."""
    model: str = ""
    notes: frozenset[str] = frozenset()

    @classmethod
    def joined(cls, parts: "Iterable[TrajectoryText]") -> "TrajectoryText":
        """Join the texts of a task's steps, in order."""
        texts = list(parts)
        return cls(
            conversations=tuple(conversation for part in texts for conversation in part.conversations),
            turns=tuple(turns for part in texts for turns in part.turns),
            model=next((part.model for part in texts if part.model), ""),
            notes=frozenset(note for part in texts for note in part.notes),
        )


def read_trajectory_text(*files: Path) -> TrajectoryText:
    """Read the trajectories of a trial, one per step. Raises `UnreadableError`, or FileNotFoundError."""
    readers = [_Reader(file) for file in files]
    histories = _without_repeats([history for reader in readers for history in reader.histories])
    own = [history for history in histories if history.sampled]
    notes = {note for reader in readers for note in reader.notes}
    if any(message.calls for history in own for message in history.messages if not history.tools):
        notes.add("no_tool_definitions")
    has_system = any(message.role == "system" for history in own for message in history.messages)
    if any(reader.agent in _SYSTEM_NOT_STORED for reader in readers) and not has_system:
        notes.add("no_system_prompt")
    return TrajectoryText(
        conversations=tuple(history.conversation() for history in own),
        turns=tuple(tuple(history.turns) for history in own),
        model=next((reader.model for reader in readers if reader.model), ""),
        notes=frozenset(notes),
    )


def _without_repeats(histories: list[History]) -> list[History]:
    """Drop histories that a later one continues: a step of a task may repeat the earlier ones."""
    return [
        history
        for number, history in enumerate(histories)
        if not any(later.continues(history) for later in histories[number + 1 :])
    ]


class _Reader:
    """Reads one trajectory file and the files that it refers to."""

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
        """Read a file and its continuations."""
        self._read.add(file.resolve())
        trajectory, history = read_trajectory(file), None
        while trajectory is not None:
            self.model = self.model or trajectory.agent.model_name or ""
            self.agent = self.agent or trajectory.agent.name
            history = self._add(trajectory, "", history)
            after = trajectory.continued_trajectory_ref
            trajectory = self._find(after) if after else None

    def _add(self, trajectory: Trajectory, name: str, before: History | None = None) -> History | None:
        """Add its histories and those of its subagents. Returns its last own one, which another file may continue."""
        built = HistoryBuilder(trajectory, name, self.notes).build(before, self._questions(trajectory))
        self.histories += [history for history in built if history is not before]
        for subagent in trajectory.subagent_trajectories or ():
            self._add(subagent, subagent.trajectory_id or subagent.agent.name or "subagent")
        embedded = {subagent.trajectory_id for subagent in trajectory.subagent_trajectories or ()} - {None}
        for reference in trajectory.references():
            if reference.trajectory_path and reference.trajectory_id not in embedded:
                self._add_file(reference.trajectory_path)
        return next((history for history in reversed(built) if history.name == name), before)

    def _add_file(self, name: str) -> None:
        if trajectory := self._find(name):
            self._add(trajectory, Path(name).stem.removeprefix("trajectory."))

    def _find(self, name: str) -> Trajectory | None:
        """Load a file that another refers to; None if it was read before or cannot be read."""
        file = self._place(name)
        if file in self._read:
            return None
        if file is not None:
            self._read.add(file)
        return self._load(file)

    def _place(self, name: str) -> Path | None:
        """The path of a file in the agent's folder. Files outside it are not read."""
        try:
            file = (self._folder / name).resolve()
            return file if file.is_relative_to(self._folder.resolve()) and file.is_file() else None
        except (OSError, ValueError):  # the name is too long or has a null byte
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
        """By the id of each summary step, the questions that terminus-2 asked itself. They stay in the history."""
        found: dict[int, list[AtifStep]] = {}
        for step in trajectory.steps:
            paths = [ref.trajectory_path or "" for result in step.results for ref in result.references()]
            asked = [path for path in paths if step.replaces_context and path.endswith("-questions.json")]
            for path in asked:
                if questions := self._load(self._place(path)):
                    found[id(step)] = questions.steps
        return found
