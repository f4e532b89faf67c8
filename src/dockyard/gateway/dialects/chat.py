"""The OpenAI Chat Completions dialect: requests to canonical messages, and replies back to the wire format.

Sampling parameters are not read here on purpose: the trainer sets the sampling.
"""

import secrets
import time
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

from dockyard.chat_format import chat_message, parse_arguments
from dockyard.gateway.protocol import (
    AdvertisedModel,
    ModelReply,
    RefusedError,
    asks_for_structure,
    dump,
    function_tool,
    invalid,
    one_system,
    openai_error,
    validate,
)
from dockyard.types import ASSISTANT, Json, Message, Prompt, ToolCall


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
class ChatRequest:
    """One request, and the options of its response."""

    prompt: Prompt
    max_tokens: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    head: Json
    """The fields that every object of the response repeats: id, time, model."""
    served: AdvertisedModel

    def body(self, reply: ModelReply) -> Json:
        choice = {"index": 0, "message": _answer(reply), "finish_reason": _finish(reply), **self._tokens(reply)}
        return self._object("chat.completion", reply, choices=[choice], usage=_usage(reply))

    def begin(self, reply: ModelReply | None = None) -> bytes:
        return b""

    def events(self, reply: ModelReply) -> bytes:
        """The whole reply as a stream: the message, the finish reason, the usage."""
        delta = _answer(reply)
        for index, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = index
        first = {"index": 0, "delta": delta, "finish_reason": None}
        last: Json = {"index": 0, "delta": {}, "finish_reason": _finish(reply)}
        chunks = [
            self._object("chat.completion.chunk", reply, choices=[first | self._tokens(reply)]),
            self._chunk(choices=[last]),
        ]
        if self.include_usage:
            chunks.append(self._chunk(choices=[], usage=_usage(reply)))
        return b"".join(map(_event, chunks)) + b"data: [DONE]\n\n"

    def keep_alive(self) -> bytes:
        """An empty chunk. A comment is not enough: qwen-code's idle timer ignores comments."""
        return _event(self._chunk(choices=[{"index": 0, "delta": {}, "finish_reason": None}]))

    def error_event(self, refused: RefusedError) -> bytes:
        return _event(openai_error(refused))

    def _object(self, kind: str, reply: ModelReply, **fields: Any) -> Json:
        prompt = {"prompt_token_ids": reply.turn.prompt_ids.tolist()} if self.return_token_ids else {}
        return {**self.head, "object": kind, **fields, **prompt}

    def _chunk(self, **fields: Any) -> Json:
        return {**self.head, "object": "chat.completion.chunk", **fields}

    def _tokens(self, reply: ModelReply) -> Json:
        ids = reply.turn.sampled_ids.tolist()
        fields: Json = {"logprobs": None}
        if self.logprobs and reply.turn.logprobs is not None:
            pairs = zip(ids, reply.turn.logprobs.tolist(), strict=True)
            fields["logprobs"] = {"content": [self._logprob(token_id, logprob) for token_id, logprob in pairs]}
        if self.return_token_ids:
            fields["token_ids"] = ids
        return fields

    def _logprob(self, token_id: int, logprob: float) -> Json:
        text = self.served.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """`/v1/chat/completions`."""

    served: AdvertisedModel

    def parse(self, body: object) -> ChatRequest:
        wire = validate(_Body, body)
        _refuse_unsupported(wire)
        limits = [limit for limit in (wire.max_tokens, wire.max_completion_tokens) if limit is not None]
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.served.model_name}
        return ChatRequest(
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
        return openai_error(refused)


def _event(data: Json) -> bytes:
    return b"data: " + dump(data) + b"\n\n"


def _finish(reply: ModelReply) -> str:
    finish = reply.turn.finish.value
    return "tool_calls" if reply.message.calls and finish == "stop" else finish


def _answer(reply: ModelReply) -> Json:
    """The reply's message. Its content is null, not empty, if there is no text."""
    return {**chat_message(reply.message), "content": reply.message.text or None}


def _usage(reply: ModelReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.num_prompt,
        "completion_tokens": reply.num_sampled,
        "total_tokens": reply.num_prompt + reply.num_sampled,
    }


def _refuse_unsupported(wire: _Body) -> None:
    """Refuse parameters that would change the reply if they were not ignored."""
    if wire.n not in (None, 1):
        invalid(f"`n` is {wire.n}: only 1 completion per call is supported")
    if wire.functions:
        invalid("`functions` is not supported: use `tools`")
    for index, tool in enumerate(wire.tools or ()):
        if tool.function is None:
            invalid(f"`tools.{index}` has the type `{tool.type}`: only `function` is supported")


def _prompt(wire: _Body) -> Prompt:
    messages = [_message(index, message) for index, message in enumerate(wire.messages)]
    tools = [tool.function for tool in wire.tools or () if tool.function]
    return Prompt(
        one_system(messages),
        tuple(function_tool(tool.name, tool.description, tool.parameters) for tool in tools),
        auxiliary=asks_for_structure(wire.response_format) and not tools,
    )


def _message(index: int, wire: _Message) -> Message:
    text = _flatten(index, wire)
    match wire.role:
        case "assistant":
            reasoning = wire.reasoning_content or wire.reasoning or ""
            return Message(ASSISTANT, text, reasoning, tuple(map(_call, wire.tool_calls or ())))
        case "tool" | "function":
            return Message("tool", text, call_id=wire.tool_call_id or "")
        case role:
            return Message("system" if role == "developer" else role, text)


def _call(wire: _ToolCall) -> ToolCall:
    arguments = wire.function.arguments
    values = arguments if isinstance(arguments, dict) else parse_arguments(arguments or "")
    return ToolCall(wire.id, wire.function.name, values)


def _flatten(index: int, message: _Message) -> str:
    if message.content is None:
        if message.role == ASSISTANT:
            return ""
        invalid(f"`messages.{index}.content` is missing")
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type != "text" and message.role not in ("tool", "function"):
            invalid(f"`messages.{index}.content` has a part of type `{part.type}`: only `text` is supported")
    # The agent cannot undo a tool's output, so parts that are not text are named instead of refused.
    return "\n".join(part.text or "" if part.type == "text" else f"[{part.type}]" for part in message.content)
