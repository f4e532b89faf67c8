"""Converts conversations to the text format of Harbor's trace exports, and back as far as that format allows.

In that format every message is the user's or the assistant's: tools are in `<tools>` before the system text, reasoning
in `<think>`, calls in `<tool_call>`, and the results of a turn's calls are one message.
"""

import json
import re
import zlib
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

from dockyard.convert import atif
from dockyard.convert.atif import Agent, AtifCall, AtifStep, Trajectory
from dockyard.convert.conversation import Conversation
from dockyard.types import ASSISTANT, Json, Message, ToolCall

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": ASSISTANT,
    "gpt": ASSISTANT,
    "model": ASSISTANT,
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>\n\n", re.DOTALL)
_THOUGHT = re.compile(r"<think>(.*?)</think>\n?", re.DOTALL)
_LAST_CALL = re.compile(r"(?:\A|\n)<tool_call>\n((?:(?!<tool_call>).)*)\n</tool_call>\s*\Z", re.DOTALL)


class NoConversationError(Exception):
    """A cell does not contain a conversation."""


def to_harbor(conversation: Conversation) -> list[dict[str, str]]:
    """The conversation up to the last reply, in the form of `harbor traces export`."""
    messages = list(conversation.messages)
    while messages and messages[-1].role != ASSISTANT:
        messages.pop()
    tools = json.dumps(conversation.tools, ensure_ascii=False, indent=2) if conversation.tools else ""
    turns: list[dict[str, str]] = []
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            turns.append({"role": "user", "content": "\n".join(message.text for message in group)})
            continue
        for message in group:
            before = f"<tools>\n{tools}\n</tools>\n\n" if tools and message.role == "system" else ""
            tools = "" if before else tools
            role = ASSISTANT if message.role == ASSISTANT else "user"
            turns.append({"role": role, "content": before + _words(message)})
    return turns


def _words(message: Message) -> str:
    calls = [
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}\n</tool_call>"
        for call in message.calls
    ]
    thought = f"<think>{message.reasoning}</think>" if message.reasoning else ""
    return "\n".join(part for part in (thought, message.text, *calls) if part)


@dataclass(slots=True)
class HarborReader:
    """Parses the messages of one cell."""

    agent: str
    tools: tuple[Json, ...] = ()
    notes: set[str] = field(default_factory=set[str])
    _open: list[str] = field(default_factory=list[str])
    """The ids of calls without a result so far."""

    def messages(self, cell: Any) -> list[Message]:
        """Parse a cell. Raises `NoConversationError`."""
        found = [_plain(turn, number) for number, turn in enumerate(_turns(cell), 1)]
        if not any(role == ASSISTANT for role, _ in found):
            raise NoConversationError("it has no message of the assistant")
        return [self._message(role, text, is_first=number == 0) for number, (role, text) in enumerate(found)]

    def _message(self, role: str, text: str, *, is_first: bool) -> Message:
        if role == ASSISTANT:
            return self._reply(text)
        if is_first and (tools := _TOOLS.match(text)) and (listed := tools_of(tools[1])):
            self.tools = listed
            return Message("system", text[tools.end() :])
        answered, self._open = self._open, []
        if len(answered) == 1 or (role == "tool" and answered):
            self._open = answered[1:]
            return Message("tool", text, call_id=answered[0])
        if answered:
            self.notes.add("joined_results")
        return Message("user" if role == "tool" else role, text)

    def _reply(self, text: str) -> Message:
        thought = _THOUGHT.match(text)
        rest, calls = _calls(text[thought.end() :] if thought else text)
        reasoning = thought[1] if thought else ""
        if self.agent.startswith(atif.NAME):
            atif_calls = [
                AtifCall(tool_call_id=call.id, function_name=call.name, arguments=call.arguments) for call in calls
            ]
            step = AtifStep(source="agent", message=rest, tool_calls=atif_calls or None)
            whole = atif.reply_of(step, Agent(name=self.agent))
            if whole is not None:
                self.notes.add("rebuilt_replies")
                return Message(ASSISTANT, whole, reasoning)
        self._open = [call.id for call in calls]
        return Message(ASSISTANT, rest, reasoning, calls)


def tools_of(cell: Any) -> tuple[Json, ...]:
    """Functions in OpenAI's form. Parquet adds null for keys that only other tools have; these are removed."""
    listed = as_list(_json(cell) if isinstance(cell, str) else cell) or []
    definitions: list[Json] = [_without_nulls(tool) for tool in listed if isinstance(tool, dict)]
    return Trajectory(schema_version="", agent=Agent(tool_definitions=definitions), steps=[]).tools()


def _without_nulls(value: Any) -> Any:
    if (inside := as_list(value)) is not None:
        return [_without_nulls(inner) for inner in inside]
    if (fields := as_dict(value)) is not None:
        return {name: _without_nulls(inner) for name, inner in fields.items() if inner is not None}
    return value


def _turns(cell: Any) -> list[Any]:
    turns = as_list(_json(cell) if isinstance(cell, str) else cell)
    if not turns:
        raise NoConversationError("it is not a list of messages" if cell and turns is None else "it is empty")
    return turns


def _plain(turn: Any, number: int) -> tuple[str, str]:
    """`role` and `content`, or ShareGPT's `from` and `value`."""
    fields = as_dict(turn)
    if fields is None:
        raise NoConversationError(f"message {number} is not an object")
    name = fields.get("role") or fields.get("from")
    role = _ROLES.get(str(name))
    if role is None:
        raise NoConversationError(f"message {number} has the unknown role `{name}`")
    content = fields.get("content")
    return role, _text(fields.get("value") if content is None else content)


def _text(content: Any) -> str:
    if (parts := as_list(content)) is not None:
        return "\n".join(_text(fields.get("text") if (fields := as_dict(part)) else part) for part in parts)
    return "" if content is None else str(content)


def _calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split the calls off the end of a text. The same text always gives the same call ids."""
    calls: list[ToolCall] = []
    stem = f"call_{zlib.crc32(text.encode(errors='replace')):08x}"
    while found := _LAST_CALL.search(text):
        call = as_dict(_json(found[1]))
        if call is None or not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
            break
        calls.append(ToolCall(f"{stem}_{len(calls)}", call["name"], call["arguments"]))
        text = text[: found.start()]
    return text, tuple(reversed(calls))


def _json(text: str) -> Any:
    """The parsed value; None if the text is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def as_list(value: Any) -> list[Any] | None:
    """The value if it is a list, else None."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def as_dict(value: Any) -> Json | None:
    """The value if it is an object, else None."""
    return cast("Json", value) if isinstance(value, dict) else None
