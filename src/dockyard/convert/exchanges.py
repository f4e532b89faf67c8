"""The calls of a rollout in text mode become conversations: each call that goes on from another is joined to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dockyard.convert.conversation import Conversation
from dockyard.gateway.calls import arguments_object, strict_object
from dockyard.gateway.history import ASSISTANT, Json, Message, ToolCall


@dataclass(slots=True)
class _Thread:
    """A history as it grows."""

    tools: tuple[Json, ...]
    messages: list[Message]
    sampled: set[int] = field(default_factory=set[int])
    cut: set[int] = field(default_factory=set[int])
    delivered: bool = True
    """Did the agent get the last reply?"""

    def say(self, exchange: Mapping[str, Any]) -> None:
        place = len(self.messages)
        self.messages.append(message_of(exchange["reply"]))
        self.sampled.add(place)
        if exchange.get("finish") == "length":
            self.cut.add(place)
        self.delivered = bool(exchange.get("delivered", True))

    def take_back(self) -> None:
        """The last reply is not part of the rollout: it was sampled anew, or never arrived."""
        place = len(self.messages) - 1
        self.messages.pop()
        self.sampled.discard(place)
        self.cut.discard(place)


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
    thread = _Thread(tools, history)
    threads.append(thread)
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
    values = strict_object(arguments) or {} if isinstance(arguments, dict) else arguments_object(arguments or "")
    return ToolCall(wire.get("id") or "", function["name"], values)
