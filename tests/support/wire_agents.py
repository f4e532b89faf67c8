"""Histories in the words of the three dialects, and answers read back, as agents write and read them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from dockyard.gateway.dialects.chat import ChatDialect
from dockyard.gateway.dialects.messages import MessagesDialect
from dockyard.gateway.dialects.responses import ResponsesDialect
from dockyard.gateway.protocol import AdvertisedModel
from dockyard.types import ASSISTANT, Message, ToolCall

type Json = dict[str, Any]
SERVED = AdvertisedModel("policy", lambda token_id: f"<{token_id}>")


@dataclass(frozen=True)
class Style:
    """How an agent writes what means the same."""

    spaced: bool = True
    escaped: bool = False
    in_parts: bool = False

    def arguments(self, call: ToolCall) -> str:
        separators = None if self.spaced else (",", ":")
        return json.dumps(call.arguments, ensure_ascii=self.escaped, separators=separators)

    def text(self, text: str) -> str | list[Json]:
        return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}] if self.in_parts else text


class Wire(Protocol):
    """One dialect from the agent's side."""

    @property
    def dialect(self) -> ChatDialect | MessagesDialect | ResponsesDialect: ...
    def body(self, messages: Sequence[Message], tools: Sequence[Json], style: Style) -> Json: ...
    def answer(self, body: Json) -> Message: ...


class ChatWire:
    dialect = ChatDialect(SERVED)

    def body(self, messages: Sequence[Message], tools: Sequence[Json], style: Style) -> Json:
        return {"messages": [self._message(message, style) for message in messages], "tools": list(tools)}

    def _message(self, message: Message, style: Style) -> Json:
        if message.role != ASSISTANT:
            answered = {"tool_call_id": message.call_id} if message.role == "tool" else {}
            return {"role": message.role, "content": style.text(message.text), **answered}
        wire: Json = {"role": ASSISTANT, "content": message.text or None}
        if message.reasoning:
            wire["reasoning_content"] = message.reasoning
        if message.calls:
            wire["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": style.arguments(call)}}
                for call in message.calls
            ]
        return wire

    def answer(self, body: Json) -> Message:
        said = body["choices"][0]["message"]
        calls = [(call["id"], call["function"]) for call in said.get("tool_calls", [])]
        return Message(
            ASSISTANT,
            said["content"] or "",
            said.get("reasoning_content", ""),
            tuple(ToolCall(id_, made["name"], json.loads(made["arguments"])) for id_, made in calls),
        )


class MessagesWire:
    dialect = MessagesDialect(SERVED)

    def body(self, messages: Sequence[Message], tools: Sequence[Json], style: Style) -> Json:
        opening = [message for message in messages[:1] if message.role == "system"]
        functions = [tool["function"] for tool in tools]
        return {
            "system": [{"type": "text", "text": message.text} for message in opening],
            "messages": [
                self._message(role, list(run), style)
                for role, run in groupby(messages[len(opening) :], lambda message: _side(message))
                for run in ([[message] for message in run] if role == ASSISTANT else [run])
            ],
            "tools": [
                {"name": made["name"], "description": made["description"], "input_schema": made["parameters"]}
                for made in functions
            ],
            "max_tokens": 50,
        }

    def _message(self, role: str, messages: list[Message], style: Style) -> Json:
        if role == ASSISTANT:
            return {"role": ASSISTANT, "content": _blocks(messages[0])}
        if [message.role for message in messages] == ["user"]:
            return {"role": "user", "content": style.text(messages[0].text)}
        return {"role": "user", "content": [self._block(message, style) for message in messages]}

    def _block(self, message: Message, style: Style) -> Json:
        if message.role == "user":
            return {"type": "text", "text": message.text}
        return {"type": "tool_result", "tool_use_id": message.call_id, "content": style.text(message.text)}

    def answer(self, body: Json) -> Message:
        blocks = body["content"]
        return Message(
            ASSISTANT,
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            tuple(ToolCall(block["id"], block["name"], block["input"]) for block in blocks if "input" in block),
        )


class ResponsesWire:
    dialect = ResponsesDialect(SERVED)

    def body(self, messages: Sequence[Message], tools: Sequence[Json], style: Style) -> Json:
        return {
            "input": [item for message in messages for item in self._items(message, style)],
            "tools": [{"type": "function", **tool["function"]} for tool in tools],
        }

    def _items(self, message: Message, style: Style) -> list[Json]:
        if message.role == "tool":
            return [{"type": "function_call_output", "call_id": message.call_id, "output": message.text}]
        if message.role != ASSISTANT:
            role = "developer" if message.role == "system" else message.role
            return [{"type": "message", "role": role, "content": [{"type": "input_text", "text": message.text}]}]
        thoughts = [{"type": "reasoning_text", "text": message.reasoning}]
        thought = [{"type": "reasoning", "summary": [], "content": thoughts}]
        part = {"type": "output_text", "text": message.text, "annotations": []}
        text = [{"type": "message", "role": ASSISTANT, "content": [part]}]
        calls = [
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": style.arguments(call)}
            for call in message.calls
        ]
        silent = not message.text and (message.reasoning or message.calls)
        return [*(thought if message.reasoning else []), *([] if silent else text), *calls]

    def answer(self, body: Json) -> Message:
        text = reasoning = ""
        calls: list[ToolCall] = []
        for item in body["output"]:
            match item["type"]:
                case "reasoning":
                    reasoning += "".join(part["text"] for part in item["content"])
                case "message":
                    text += "".join(part["text"] for part in item["content"])
                case _:
                    calls.append(ToolCall(item["call_id"], item["name"], json.loads(item["arguments"])))
        return Message(ASSISTANT, text, reasoning, tuple(calls))


WIRES: tuple[Wire, ...] = (ChatWire(), MessagesWire(), ResponsesWire())


def _side(message: Message) -> str:
    return ASSISTANT if message.role == ASSISTANT else "user"


def _blocks(message: Message) -> list[Json]:
    thinking = [{"type": "thinking", "thinking": message.reasoning, "signature": "none"}] if message.reasoning else []
    text = [{"type": "text", "text": message.text}] if message.text else []
    return [
        *thinking,
        *text,
        *({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in message.calls),
    ]
