"""The steps of an ATIF trajectory become histories: what the model was told and said, in the order it saw it.

A trajectory may tell several. Subagents have their own; a summary replaces what came before it; a file may go on in
another. Copied steps are context: they were said in another history.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from dockyard.convert import terminus
from dockyard.convert.atif import Content, Result, Step, Trajectory, text_of
from dockyard.convert.conversation import Conversation
from dockyard.gateway.history import ASSISTANT, Json, Message, ToolCall
from dockyard.rollout.details import KeptTurn

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
    turns: list[KeptTurn] = field(default_factory=list[KeptTurn])
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


class Narrator:
    """Tells the steps of one trajectory, whoever takes them, into histories."""

    def __init__(self, trajectory: Trajectory, name: str, notes: set[str]) -> None:
        self._trajectory = trajectory
        self._name = name
        self._notes = notes
        self._is_terminus = trajectory.agent.name.startswith(terminus.NAME)

    def tell(self, before: History | None = None, questions: "dict[int, list[Step]] | None" = None) -> list[History]:
        """One for each history, the main one first. `before` goes on here; `questions` are those asked at a step."""
        told: list[History] = []
        for lane, steps in self._lanes().items():
            goes_on = before if before and not lane and not steps[0].is_copied_context else None
            told += self._tell_lane(steps, goes_on or self._begin(lane), questions or {})
        return told

    def _lanes(self) -> dict[str, list[Step]]:
        """claude-code writes the steps of its subagents between its own."""
        lanes: dict[str, list[Step]] = {}
        for step in self._trajectory.steps:
            lane = str(step.says("agent_id") or "sidechain") if step.says("is_sidechain") else ""
            lanes.setdefault(lane, []).append(step)
        return lanes

    def _begin(self, lane: str = "") -> History:
        return History(tools=self._trajectory.tools(), name="/".join(part for part in (self._name, lane) if part))

    def _tell_lane(self, steps: list[Step], history: History, questions: dict[int, list[Step]]) -> list[History]:
        told = [history]
        for step in steps:
            if step.replaces_context:
                told.append(self._after_summary(told[-1], questions.get(id(step), [])))
            else:
                self.add(told[-1], step)
        return told

    def _after_summary(self, history: History, questions: Sequence[Step]) -> History:
        """What is left of a history when the rest was summarised: how it began, and what terminus-2 asked itself."""
        fresh = History(tools=history.tools, name=history.name)
        num_opening = next((i for i, message in enumerate(history.messages) if message.role != "system"), 0)
        fresh.messages += history.messages[: num_opening + 1 if self._is_terminus else num_opening]
        for step in questions:
            self.add(fresh, step, is_context=True)
        if self._is_terminus and not questions:
            self._notes.add("summary_missing")
        return fresh

    def add(self, history: History, step: Step, *, is_context: bool = False) -> None:
        """The messages of one step."""
        if _has_media(step):
            self._notes.add("media_left_out")
        if step.source == "agent":
            self._add_reply(history, step, is_context=is_context)
            return
        if text := text_of(step.message):
            history.messages.append(Message(step.source, text))
        history.messages += [Message("user", text) for result in step.results if (text := text_of(result.content))]

    def _add_reply(self, history: History, step: Step, *, is_context: bool) -> None:
        message = self._reply(step)
        if message.text or message.calls or message.reasoning:
            if not is_context and _is_own(step):
                self._note_own(history, step)
            history.messages.append(message)
        else:
            self._notes.add("empty_replies")
        answers = _answers(step.results, message.calls)
        history.messages += answers

    def _note_own(self, history: History, step: Step) -> None:
        place, metrics = len(history.messages), step.metrics
        history.sampled.add(place)
        if step.says("stop_reason") == "max_tokens":
            history.cut.add(place)
        if (step.llm_call_count or 1) > 1:
            self._notes.add("merged_replies")
        if metrics and metrics.prompt_token_ids and metrics.completion_token_ids:
            turn = KeptTurn.of(metrics.prompt_token_ids, metrics.completion_token_ids, metrics.logprobs)
            history.turns.append(turn)

    def _reply(self, step: Step) -> Message:
        text = text_of(step.message)
        reasoning = step.reasoning_content or ""
        if self._is_terminus:
            whole = terminus.reply_of(step, self._trajectory.agent)
            if whole is not None:
                self._notes.add("rebuilt_replies")
            return Message(ASSISTANT, text if whole is None else whole, reasoning)
        calls = tuple(call.call() for call in step.tool_calls or ())
        if calls and self._trajectory.agent.name == _OPENHANDS:
            self._notes.add("paraphrased_replies")
        # mini-swe-agent's converter gives the text a second time, as if it had been thought.
        return Message(ASSISTANT, text, "" if reasoning == text else reasoning, calls)


def _is_own(step: Step) -> bool:
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


def _has_media(step: Step) -> bool:
    contents: list[Content] = [step.message, *(result.content for result in step.results)]
    return any(isinstance(content, list) and any(part.type != "text" for part in content) for content in contents)
