"""The calls of a rollout in text mode become conversations: each call that goes on from another is joined to it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dockyard.convert.conversation import Conversation
from dockyard.gateway.calls import arguments_object
from dockyard.gateway.history import ASSISTANT, Json, Message, ToolCall


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
