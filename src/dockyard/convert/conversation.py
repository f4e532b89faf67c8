"""A conversation as text, and the result of converting one trial.

The recorded calls of a text-mode rollout become conversations: each call that continues another is joined to it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dockyard.chat_format import RAW
from dockyard.gateway.matching import ToolDefaults, same_message, tool_defaults
from dockyard.types import ASSISTANT, Exchange, Finish, Json, Message, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One history of an agent, from its first message to its last."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()
    sampled: frozenset[int] | None = None
    """The indices of the assistant messages that the model sampled in this conversation. None: all of them.

    Others are context: copied from an earlier history, or the agent's own examples.
    """
    cut: frozenset[int] = frozenset()
    """The indices of the model's messages that were cut at a token limit, so that no end token was sampled."""
    name: str = ""
    """Empty for the agent's main history; else the name of its subagent or summary."""

    @property
    def replies(self) -> tuple[int, ...]:
        """The indices of the messages that the model sampled, in order."""
        places = (place for place, message in enumerate(self.messages) if message.role == ASSISTANT)
        return tuple(place for place in places if self.sampled is None or place in self.sampled)


def without_malformed(conversation: Conversation) -> Conversation:
    """Make replies context that have a call whose arguments are not JSON: they cannot be rendered as sampled."""
    replies = conversation.replies
    kept = frozenset(p for p in replies if not any(RAW in call.arguments for call in conversation.messages[p].calls))
    return conversation if len(kept) == len(replies) else replace(conversation, sampled=kept)


def group_name(task: str, agent: str, model: str) -> str:
    """The name of a group: the attempts at one task by one agent with one model, whose rewards can be compared."""
    return json.dumps([task, agent, model])


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The result of converting one recorded attempt."""

    where: str
    """The trial's folder, or the file and row that it was read from."""
    trial: str
    agent: str
    model: str
    rollout: Rollout
    """It has segments unless the attempt was skipped."""
    group: str = ""
    """The group that its reward is compared in. Empty: all attempts at its task. See `group_name`."""
    conversations: tuple[Conversation, ...] = ()
    """The conversations, if their text is known; also for trials whose segments are exact."""
    exact: bool = False
    """Whether the ids are those that were sampled. False: they were tokenised from text."""
    skipped: str | None = None
    """Why the attempt cannot be trained on, as one word, e.g. `no_trajectory`. `detail` explains it."""
    detail: str = ""
    notes: tuple[str, ...] = ()
    """What a user of the samples should know, as one word each, e.g. `no_tool_definitions`."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """A reply of the model, and its index in the history."""

    place: int
    message: Message
    is_cut: bool


@dataclass(slots=True, eq=False)
class _Thread:
    """A history that grows call by call."""

    tools: tuple[Json, ...]
    messages: list[Message]
    sampled: set[int] = field(default_factory=set[int])
    cut: set[int] = field(default_factory=set[int])
    delivered: bool = True
    """Whether the agent received the last reply."""
    taken_back: list[_Reply] = field(default_factory=list[_Reply])

    def add_reply(self, exchange: Exchange) -> None:
        self._put(_Reply(len(self.messages), exchange.reply, exchange.finish is Finish.LENGTH))
        self.delivered = exchange.delivered

    def _put(self, reply: _Reply) -> None:
        self.messages.append(reply.message)
        self.sampled.add(reply.place)
        if reply.is_cut:
            self.cut.add(reply.place)

    def take_back(self) -> None:
        """Remove the last reply: it was sampled again, or was not delivered."""
        place = len(self.messages) - 1
        self.taken_back.append(_Reply(place, self.messages.pop(), place in self.cut))
        self.sampled.discard(place)
        self.cut.discard(place)

    def return_to(self, history: Sequence[Message], defaults: ToolDefaults) -> "_Thread | None":
        """The thread of an earlier reply to the same prompt, if this history continues that reply; else None."""
        for reply in self.taken_back:
            before = self.messages[: reply.place]
            if _begins_with(history, [*before, reply.message], defaults):
                self.taken_back.remove(reply)
                thread = self if reply.place == len(self.messages) - 1 else _Thread(self.tools, before)
                if thread is self:  # the reply that took its place was not continued
                    self.take_back()
                thread._put(reply)
                return thread
        return None


def conversations_of(exchanges: Sequence[Exchange]) -> tuple[Conversation, ...]:
    """Join the recorded calls into conversations: a call that continues another is part of the same one.

    Each reply is marked as sampled in one conversation. In histories that branch off it is context. Side calls, such as
    those for a title, are not part of the task and are left out.
    """
    threads: list[_Thread] = []
    for exchange in exchanges:
        if not exchange.prompt.auxiliary:
            _thread_for(threads, exchange.prompt.tools, list(exchange.prompt.messages)).add_reply(exchange)
    for thread in threads:
        if not thread.delivered:
            thread.take_back()
    return tuple(
        Conversation(
            messages=tuple(thread.messages),
            tools=thread.tools,
            sampled=frozenset(thread.sampled),
            cut=frozenset(thread.cut),
        )
        for thread in threads
        if thread.sampled
    )


def _thread_for(threads: list[_Thread], tools: tuple[Json, ...], history: list[Message]) -> _Thread:
    """The thread that this history continues, with the new messages of the history added."""
    alike, defaults = [thread for thread in threads if thread.tools == tools], tool_defaults(tools)
    for thread in sorted(alike, key=lambda thread: -len(thread.messages)):
        if _begins_with(history, thread.messages, defaults):
            thread.messages += history[len(thread.messages) :]
            return thread
        if len(history) == len(thread.messages) - 1 and _begins_with(history, thread.messages[:-1], defaults):
            thread.take_back()
            return thread
    returned = (thread.return_to(history, defaults) for thread in alike)
    thread = next((thread for thread in returned if thread), None) or _Thread(tools, history)
    if thread not in threads:
        threads.append(thread)
    thread.messages += history[len(thread.messages) :]
    return thread


def _begins_with(history: Sequence[Message], recorded: Sequence[Message], defaults: ToolDefaults) -> bool:
    """Whether a history that an agent sent begins with recorded messages, by the gateway's rule of the same message."""
    if len(history) < len(recorded):
        return False
    return all(same_message(known, sent, defaults) for sent, known in zip(history, recorded, strict=False))
