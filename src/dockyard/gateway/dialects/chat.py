"""The OpenAI Chat Completions dialect: wire to canonical messages and back. Knows no HTTP and no engine.

Sampling parameters are read by nobody here on purpose: sampling is the trainer's.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

from dockyard.gateway.messages import ASSISTANT, Message, Prompt, ToolCall
from dockyard.gateway.protocol import (
    RefusedError,
    Reply,
    Served,
    arguments_object,
    dump,
    function_tool,
    invalid,
    one_system,
    validate,
)
from dockyard.types import Json


class _Part(BaseModel):
    type: str
    text: str | None = None


class _Function(BaseModel):
    name: str
    arguments: str | Json | None = None


class _ToolCall(BaseModel):
    id: str = ""
    function: _Function


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _FunctionTool(BaseModel):
    name: str
    description: str | None = None
    parameters: Json | None = None


class _Tool(BaseModel):
    type: str = "function"
    function: _FunctionTool | None = None


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class _Body(BaseModel):
    messages: list[_Message] = Field(min_length=1)
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    n: int | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    tools: list[_Tool] | None = None
    functions: list[Any] | None = None
    response_format: Json | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """One request, and how its answer is to look."""

    prompt: Prompt
    max_tokens: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    head: Json
    """What every object of the answer repeats: id, time, model."""
    served: Served

    def body(self, reply: Reply) -> Json:
        message = {"role": ASSISTANT, "content": reply.message.text or None, **_extras(reply.message)}
        choice = {"index": 0, "message": message, "finish_reason": _finish(reply), **self._tokens(reply)}
        return self._object("chat.completion", reply, choices=[choice], usage=_usage(reply))

    def begin(self, reply: Reply | None = None) -> bytes:
        return b""

    def events(self, reply: Reply) -> bytes:
        """The whole answer as a stream: what was said, why it ended, what it cost."""
        extras = _extras(reply.message)
        for index, call in enumerate(extras.get("tool_calls", ())):
            call["index"] = index
        delta = {"role": ASSISTANT, "content": reply.message.text or None, **extras}
        said = {"index": 0, "delta": delta, "finish_reason": None}
        ended: Json = {"index": 0, "delta": {}, "finish_reason": _finish(reply)}
        chunks = [
            self._object("chat.completion.chunk", reply, choices=[said | self._tokens(reply)]),
            self._chunk(choices=[ended]),
        ]
        if self.include_usage:
            chunks.append(self._chunk(choices=[], usage=_usage(reply)))
        return b"".join(map(_event, chunks)) + b"data: [DONE]\n\n"

    def keep_alive(self) -> bytes:
        """A chunk that says nothing. A comment would not do: qwen-code's idle timer ignores comments."""
        return _event(self._chunk(choices=[{"index": 0, "delta": {}, "finish_reason": None}]))

    def error_event(self, refused: RefusedError) -> bytes:
        return _event(error_body(refused))

    def _object(self, kind: str, reply: Reply, **fields: Any) -> Json:
        prompt = {"prompt_token_ids": reply.turn.prompt_ids.tolist()} if self.return_token_ids else {}
        return {**self.head, "object": kind, **fields, **prompt}

    def _chunk(self, **fields: Any) -> Json:
        return {**self.head, "object": "chat.completion.chunk", **fields}

    def _tokens(self, reply: Reply) -> Json:
        ids = reply.turn.sampled_ids.tolist()
        fields: Json = {"logprobs": None}
        if self.logprobs:
            pairs = zip(ids, reply.turn.logprobs.tolist(), strict=True)
            fields["logprobs"] = {"content": [self._logprob(token_id, logprob) for token_id, logprob in pairs]}
        if self.return_token_ids:
            fields["token_ids"] = ids
        return fields

    def _logprob(self, token_id: int, logprob: float) -> Json:
        text = self.served.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


@dataclass(frozen=True, slots=True)
class Chat:
    """`/v1/chat/completions`."""

    served: Served

    def parse(self, body: object) -> ChatCall:
        wire = validate(_Body, body)
        _refuse_unserved(wire)
        limits = [limit for limit in (wire.max_tokens, wire.max_completion_tokens) if limit is not None]
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.served.model_name}
        return ChatCall(
            prompt=_prompt(wire),
            max_tokens=min(limits, default=None),
            stream=bool(wire.stream),
            include_usage=wire.stream_options is not None and bool(wire.stream_options.include_usage),
            logprobs=bool(wire.logprobs),
            return_token_ids=bool(wire.return_token_ids),
            head=head,
            served=self.served,
        )

    def error(self, refused: RefusedError) -> Json:
        return error_body(refused)


def error_body(refused: RefusedError) -> Json:
    """An error as OpenAI's clients expect it."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    return {"error": {"message": refused.message, "type": kind, "param": None, "code": refused.code}}


def _event(data: Json) -> bytes:
    return b"data: " + dump(data) + b"\n\n"


def _finish(reply: Reply) -> str:
    finish = reply.turn.finish.value
    return "tool_calls" if reply.message.calls and finish == "stop" else finish


def _extras(message: Message) -> Json:
    """What only some messages have: thoughts, tool calls."""
    extras: Json = {}
    if message.reasoning:
        extras["reasoning_content"] = message.reasoning
    if message.calls:
        extras["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json()}}
            for call in message.calls
        ]
    return extras


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.num_prompt,
        "completion_tokens": reply.num_sampled,
        "total_tokens": reply.num_prompt + reply.num_sampled,
    }


def _refuse_unserved(wire: _Body) -> None:
    """Say no to what would otherwise be silently ignored and change what the agent gets."""
    if wire.n not in (None, 1):
        invalid(f"`n` is {wire.n}: one completion per call is served")
    if wire.functions:
        invalid("`functions` is not served: it was replaced by `tools`")
    for index, tool in enumerate(wire.tools or ()):
        if tool.function is None:
            invalid(f"`tools.{index}` is of type `{tool.type}`: only `function` is served")


def _prompt(wire: _Body) -> Prompt:
    messages = [_message(index, message) for index, message in enumerate(wire.messages)]
    tools = [tool.function for tool in wire.tools or () if tool.function]
    structured = wire.response_format is not None and wire.response_format.get("type") not in (None, "text")
    return Prompt(
        one_system(messages),
        tuple(function_tool(tool.name, tool.description, tool.parameters) for tool in tools),
        auxiliary=structured and not tools,
    )


def _message(index: int, wire: _Message) -> Message:
    text = _flatten(index, wire)
    match wire.role:
        case "assistant":
            reasoning = wire.reasoning_content or wire.reasoning or ""
            return Message(ASSISTANT, text, reasoning, _calls(wire.tool_calls or ()))
        case "tool" | "function":
            return Message("tool", text, call_id=wire.tool_call_id or "")
        case role:
            return Message("system" if role == "developer" else role, text)


def _calls(wire: Sequence[_ToolCall]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call.id, call.function.name, _arguments(call.function.arguments)) for call in wire)


def _arguments(arguments: str | Json | None) -> Json:
    return arguments if isinstance(arguments, dict) else arguments_object(arguments or "")


def _flatten(index: int, message: _Message) -> str:
    if message.content is None:
        if message.role == ASSISTANT:
            return ""
        invalid(f"`messages.{index}.content` is missing")
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type != "text" and message.role not in ("tool", "function"):
            invalid(f"`messages.{index}.content` has a part of type `{part.type}`: only `text` is served")
    # What a tool returned cannot be taken back; the policy is told that there was something.
    return "\n".join(part.text or "" if part.type == "text" else f"[{part.type}]" for part in message.content)
