"""The rows of one trial in a file of traces become its conversations."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from dockyard.convert.conversation import Conversation
from dockyard.convert.exchanges import message_of
from dockyard.convert.trace_text import HarborReader, NoConversationError, tools_of
from dockyard.gateway.history import ASSISTANT, Json, Message

MAIN = "main"
"""The source of the rows that tell the agent's own history; others name a subagent or a summary."""
_EPISODE = re.compile(r"(?:episode-)?(\d+)")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One row, by our names of the columns."""

    number: int
    values: Json

    @property
    def key(self) -> tuple[str, str]:
        """What the rows of one trial have in common. A row that names no trial is one."""
        trial = self.text("trial_name")
        return (self.text("run_id"), trial) if trial else ("", f"row-{self.number}")

    @property
    def episode(self) -> int | None:
        found = _EPISODE.fullmatch(self.text("episode"))
        return int(found[1]) if found else None

    @property
    def source(self) -> str:
        source = self.text("trace_source")
        return "" if source == MAIN else source

    def text(self, name: str) -> str:
        value = self.values.get(name)
        return "" if value is None else str(value)

    def number_in(self, name: str) -> float | None:
        try:
            number = float(self.values[name])
        except (KeyError, TypeError, ValueError):
            return None
        return number if math.isfinite(number) else None


def conversations_in(rows: list[TraceRow], notes: set[str]) -> Iterator[Conversation]:
    """Of all the rows of a trial. Raises `NoConversationError`."""
    if "conversation_json" in rows[0].values and all(row.text("conversation_json") for row in rows):
        yield from map(_recorded, rows)
        return
    for source in dict.fromkeys(row.source for row in rows):
        own = sorted((row for row in rows if row.source == source), key=lambda row: row.episode or 0)
        yield from _joined(own, source, notes)


def _recorded(row: TraceRow) -> Conversation:
    try:
        recorded = json.loads(row.text("conversation_json"))
        return Conversation(
            messages=tuple(map(message_of, recorded["messages"])),
            tools=tuple(recorded["tools"]),
            sampled=frozenset(recorded["sampled"]),
            cut=frozenset(recorded["cut"]),
            name=recorded["name"],
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NoConversationError(f"`conversation_json` of row {row.number} is damaged: {error}") from error


def _joined(rows: list[TraceRow], name: str, notes: set[str]) -> Iterator[Conversation]:
    """The rows of one source in the order of their episodes: a row that goes on from the one before takes its place."""
    every = len(rows) > 1 and [row.episode for row in rows] == list(range(len(rows)))
    said: list[Message] = []
    chain: Conversation | None = None
    for row in rows:
        now = _conversation(row, name, notes)
        goes_on = chain is not None and now.messages[: len(chain.messages)] == chain.messages
        if chain is not None and not goes_on:
            said += [chain.messages[place] for place in chain.replies]
            yield chain
        sampled = _sampled(now, said, only_last=every)
        before = chain.sampled or frozenset[int]() if chain is not None and goes_on else frozenset[int]()
        chain = Conversation(messages=now.messages, tools=now.tools, sampled=before | sampled, name=name)
    if chain is not None:
        yield chain


def _sampled(conversation: Conversation, said: list[Message], *, only_last: bool) -> frozenset[int]:
    """`only_last`: what the model said before has rows of its own. Else what was said in an earlier one is copied."""
    replies = conversation.replies
    return frozenset(replies[-1:] if only_last else [p for p in replies if conversation.messages[p] not in said])


def _conversation(row: TraceRow, name: str, notes: set[str]) -> Conversation:
    reader = HarborReader(row.text("agent"), tools_of(row.values.get("tool_definitions")), notes)
    try:
        messages = reader.messages(row.values["conversations"])
    except NoConversationError as error:
        raise NoConversationError(f"`conversations` of row {row.number}: {error}") from error
    if messages[0].role == ASSISTANT and row.text("instruction"):
        messages.insert(0, Message("user", row.text("instruction")))
    return Conversation(messages=tuple(messages), tools=reader.tools, name=name)
