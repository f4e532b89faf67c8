"""Parses the answer of a Chat Completions endpoint in text mode."""

import secrets

from pydantic import BaseModel, Field

from dockyard.chat_format import replace_surrogates, strict_object
from dockyard.types import ASSISTANT, Finish, Json, Message, ToolCall


class _Function(BaseModel):
    name: str
    arguments: str | Json | None = None


class _Call(BaseModel):
    id: str | None = None
    function: _Function


class _Part(BaseModel):
    text: str | None = None


class _ReplyMessage(BaseModel):
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


class EndpointAnswer(BaseModel):
    """The body of an endpoint's answer."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


def new_call_id() -> str:
    return f"call_{secrets.token_hex(16)}"


def reply_message(wire: Json) -> Message:
    """Parse the endpoint's message. A call whose arguments are not valid JSON becomes text: agents crash on it."""
    reply = _ReplyMessage.model_validate(wire)
    calls: list[ToolCall] = []
    texts = [reply.text]
    for call in reply.tool_calls or ():
        name, arguments = call.function.name, strict_object(call.function.arguments or "{}")
        if arguments is None:
            texts.append(f"<tool_call>\n{name}: {call.function.arguments}\n</tool_call>")
        else:
            calls.append(ToolCall(call.id or new_call_id(), replace_surrogates(name), arguments))
    text = "\n".join(text for text in texts if text)
    reasoning = reply.reasoning_content or reply.reasoning or ""
    return Message(ASSISTANT, replace_surrogates(text), replace_surrogates(reasoning), tuple(calls))
