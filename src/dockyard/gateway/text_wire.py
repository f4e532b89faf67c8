"""Messages as chat completions write them: what is said to an endpoint for text, and what it answers."""

import secrets

from pydantic import BaseModel, Field

from dockyard.gateway.calls import strict_object
from dockyard.gateway.history import ASSISTANT, Json, Message, ToolCall
from dockyard.gateway.ledger import Exchange
from dockyard.types import Finish


def chat_message(message: Message) -> Json:
    """A message as chat completions have it."""
    wire: Json = {"role": message.role, "content": message.text}
    if message.role == "tool":
        wire["tool_call_id"] = message.call_id
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.calls:
        wire["content"] = message.text or None
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json()}}
            for call in message.calls
        ]
    return wire


def exchange_json(exchange: Exchange) -> Json:
    """A recorded call as data."""
    num_prompt, num_sampled = exchange.usage
    return {
        "messages": [chat_message(message) for message in exchange.prompt.messages],
        "tools": list(exchange.prompt.tools),
        "reply": chat_message(exchange.reply),
        "finish": exchange.finish.value,
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_sampled},
        "delivered": exchange.delivered,
        "auxiliary": exchange.prompt.auxiliary,
    }


class _Function(BaseModel):
    name: str
    arguments: str | Json | None = None


class _Call(BaseModel):
    id: str | None = None
    function: _Function


class _Part(BaseModel):
    text: str | None = None


class _Said(BaseModel):
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "\n".join(part.text or "" for part in parts)


class _Choice(BaseModel):
    message: Json
    finish_reason: str | None = None

    @property
    def finish(self) -> Finish:
        return Finish.LENGTH if self.finish_reason == "length" else Finish.STOP


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> tuple[int, int]:
        return self.prompt_tokens, self.completion_tokens


class ChatAnswer(BaseModel):
    """What an endpoint answers to a chat body."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


def said_message(wire: Json) -> Message:
    """The endpoint's reply as its agent gets it. A call without valid JSON becomes text: agents die of it."""
    said = _Said.model_validate(wire)
    calls: list[ToolCall] = []
    texts = [said.text]
    for call in said.tool_calls or ():
        name, arguments = call.function.name, strict_object(call.function.arguments or "{}")
        if arguments is None:
            texts.append(f"<tool_call>\n{name}: {call.function.arguments}\n</tool_call>")
        else:
            calls.append(ToolCall(call.id or f"call_{secrets.token_hex(16)}", _clean(name), arguments))
    text = "\n".join(text for text in texts if text)
    return Message(ASSISTANT, _clean(text), _clean(said.reasoning_content or said.reasoning or ""), tuple(calls))


def _clean(text: str) -> str:
    """Half a surrogate pair is no text."""
    return text.encode(errors="replace").decode()
