"""A conversation as text, and the result of converting one trial.

The recorded calls of a text-mode rollout become conversations: each call that continues another is joined to it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dockyard.gateway.messages import ASSISTANT, Message, ToolCall
from dockyard.gateway.protocol import RAW, arguments_object
from dockyard.types import Json, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One history of an agent, from its first message to its last."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()
    sampled: frozenset[int] | None = None
    """Which assistant messages the model said in this conversation, by their place. None: all of them.

    Others are context: copied from an earlier history, or examples of the agent's own.
    """
    cut: frozenset[int] = frozenset()
    """Of the model's messages those that a token limit cut: nobody sampled an end for them."""
    name: str = ""
    """Empty for the agent's own history; else the subagent or the summary it belongs to."""

    @property
    def replies(self) -> tuple[int, ...]:
        """The places of the model's own messages, in order."""
        spoken = (place for place, message in enumerate(self.messages) if message.role == ASSISTANT)
        return tuple(place for place in spoken if self.sampled is None or place in self.sampled)


def without_malformed(conversation: Conversation) -> Conversation:
    """Calls whose arguments are no JSON cannot be shown as the model wrote them: what it said there becomes context."""
    said = conversation.replies
    kept = frozenset(p for p in said if not any(RAW in call.arguments for call in conversation.messages[p].calls))
    return conversation if len(kept) == len(said) else replace(conversation, sampled=kept)


def group_name(task: str, agent: str, model: str) -> str:
    """Attempts at one task by one agent with one model: others are no measure for each other."""
    return json.dumps([task, agent, model])


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What became of one recorded attempt."""

    where: str
    """The trial's folder, or the file and row it was read from."""
    trial: str
    agent: str
    model: str
    rollout: Rollout
    """With segments unless it was skipped."""
    group: str = ""
    """What its rewards are compared within; empty: the attempts at its task. See `group_name`."""
    conversations: tuple[Conversation, ...] = ()
    """What was said, where the text is known; also of trials whose segments are exact."""
    exact: bool = False
    """The ids are those that were sampled. False: text, tokenised anew."""
    skipped: str | None = None
    """Why it is no training data, in one word, e.g. `no_trajectory`; `detail` says more."""
    detail: str = ""
    notes: tuple[str, ...] = ()
    """What a reader of the samples should know, in one word each, e.g. `no_tool_definitions`."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """What the model said, and where in its history."""

    place: int
    message: Message
    is_cut: bool


@dataclass(slots=True, eq=False)
class _Thread:
    """A history as it grows."""

    tools: tuple[Json, ...]
    messages: list[Message]
    sampled: set[int] = field(default_factory=set[int])
    cut: set[int] = field(default_factory=set[int])
    delivered: bool = True
    """Did the agent get the last reply?"""
    taken_back: list[_Reply] = field(default_factory=list[_Reply])

    def say(self, exchange: Mapping[str, Any]) -> None:
        is_cut = exchange.get("finish") == "length"
        self._put(_Reply(len(self.messages), message_of(exchange["reply"]), is_cut))
        self.delivered = bool(exchange.get("delivered", True))

    def _put(self, reply: _Reply) -> None:
        self.messages.append(reply.message)
        self.sampled.add(reply.place)
        if reply.is_cut:
            self.cut.add(reply.place)

    def take_back(self) -> None:
        """The last reply is not part of the rollout: it was sampled anew, or never arrived."""
        place = len(self.messages) - 1
        self.taken_back.append(_Reply(place, self.messages.pop(), place in self.cut))
        self.sampled.discard(place)
        self.cut.discard(place)

    def return_to(self, history: Sequence[Message]) -> "_Thread | None":
        """Of several replies to one prompt an agent may go on with an earlier one. None if this history does not."""
        for reply in self.taken_back:
            before = self.messages[: reply.place]
            if _begins_with(history, [*before, reply.message]):
                self.taken_back.remove(reply)
                thread = self if reply.place == len(self.messages) - 1 else _Thread(self.tools, before)
                if thread is self:  # nobody went on with the reply that took its place
                    self.take_back()
                thread._put(reply)
                return thread
        return None


def conversations_of(exchanges: Sequence[Mapping[str, Any]]) -> tuple[Conversation, ...]:
    """Every reply is the model's own in one of them; in histories that branched off it is context.

    Side calls, such as those for a title, are not the task and are left out.
    """
    threads: list[_Thread] = []
    for exchange in (exchange for exchange in exchanges if not exchange.get("auxiliary")):
        history = [message_of(message) for message in exchange["messages"]]
        tools = tuple(exchange.get("tools") or ())
        _thread_for(threads, tools, history).say(exchange)
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
    """The one that this history goes on from, with what is new in it."""
    alike = [thread for thread in threads if thread.tools == tools]
    for thread in sorted(alike, key=lambda thread: -len(thread.messages)):
        if _begins_with(history, thread.messages):
            thread.messages += history[len(thread.messages) :]
            return thread
        if len(history) == len(thread.messages) - 1 and _begins_with(thread.messages, history):
            thread.take_back()
            return thread
    returned = (thread.return_to(history) for thread in alike)
    thread = next((thread for thread in returned if thread), None) or _Thread(tools, history)
    if thread not in threads:
        threads.append(thread)
    thread.messages += history[len(thread.messages) :]
    return thread


def _begins_with(messages: Sequence[Message], beginning: Sequence[Message]) -> bool:
    if len(messages) < len(beginning):
        return False
    return all(_is_echo(ours, theirs) for ours, theirs in zip(messages, beginning, strict=False))


def _is_echo(sent: Message, said: Message) -> bool:
    """Agents re-wrap what the model said, and leave out thoughts."""
    if sent.role != ASSISTANT or said.role != ASSISTANT:
        return sent == said
    same_calls = [(call.id, call.name) for call in sent.calls] == [(call.id, call.name) for call in said.calls]
    text = sent.text.split()
    return same_calls and (text == said.text.split() or (not text and bool(sent.calls)))


def message_of(wire: Mapping[str, Any]) -> Message:
    """A message as chat completions have it."""
    calls = tuple(_call(call) for call in wire.get("tool_calls") or ())
    return Message(
        role=wire["role"],
        text=_text(wire.get("content")),
        reasoning=_clean(wire.get("reasoning_content") or ""),
        calls=calls,
        call_id=wire.get("tool_call_id") or "",
    )


def _text(content: str | list[Mapping[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return _clean(content or "")
    parts = (part.get("text") or "" if part["type"] == "text" else f"[{part['type']}]" for part in content)
    return _clean("\n".join(parts))


def _clean(text: str) -> str:
    """Half a surrogate pair is no text."""
    return text.encode(errors="replace").decode()


def _call(wire: Mapping[str, Any]) -> ToolCall:
    function: Json = wire["function"]
    arguments: Json | str | None = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return ToolCall(wire.get("id") or "", function["name"], arguments_object(text))
