"""The OpenAI Chat Completions dialect: wire to canonical messages and back. Knows no HTTP and no engine.

Sampling parameters are read by nobody here on purpose: sampling is the trainer's.
"""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from dockyard.gateway.forest import ASSISTANT, Message
from dockyard.gateway.sessions import RefusedError, Reply

type Json = dict[str, Any]


class _Part(BaseModel):
    type: str
    text: str = ""


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_Part] | None = None
    tool_calls: list[Any] | None = None


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Body(BaseModel):
    messages: list[_Message] = Field(min_length=1)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    n: int | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """One request, and how its answer is to look."""

    messages: tuple[Message, ...]
    max_tokens: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    head: Json
    """What every object of the answer repeats: id, time, model."""
    token_text: Callable[[int], str]

    def body(self, reply: Reply) -> Json:
        message = {"role": ASSISTANT, "content": reply.text}
        choice = {"index": 0, "message": message, "finish_reason": reply.turn.finish.value, **self._tokens(reply)}
        return self._object("chat.completion", reply, choices=[choice], usage=_usage(reply))

    def events(self, reply: Reply) -> bytes:
        """The whole answer as a stream: what was said, why it ended, what it cost."""
        said = {"index": 0, "delta": {"role": ASSISTANT, "content": reply.text}, "finish_reason": None}
        ended: Json = {"index": 0, "delta": {}, "finish_reason": reply.turn.finish.value}
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
        text = self.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


@dataclass(frozen=True, slots=True)
class Chat:
    """`/v1/chat/completions`."""

    model_name: str
    token_text: Callable[[int], str]

    def parse(self, body: object) -> ChatCall:
        try:
            wire = _Body.model_validate(body)
        except ValidationError as error:
            raise _invalid(_first_problem(error)) from error
        _refuse_unserved(wire)
        limits = [limit for limit in (wire.max_tokens, wire.max_completion_tokens) if limit is not None]
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.model_name}
        return ChatCall(
            messages=_canonical(wire.messages),
            max_tokens=min(limits, default=None),
            stream=bool(wire.stream),
            include_usage=wire.stream_options is not None and wire.stream_options.include_usage,
            logprobs=bool(wire.logprobs),
            return_token_ids=bool(wire.return_token_ids),
            head=head,
            token_text=self.token_text,
        )

    def error(self, refused: RefusedError) -> Json:
        return error_body(refused)


def error_body(refused: RefusedError) -> Json:
    """An error as OpenAI's clients expect it."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    return {"error": {"message": refused.message, "type": kind, "param": None, "code": refused.code}}


def _event(data: Json) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _usage(reply: Reply) -> dict[str, int]:
    num_prompt, num_sampled = len(reply.turn.prompt_ids), len(reply.turn.sampled_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def _invalid(message: str) -> RefusedError:
    return RefusedError(400, "invalid_request", message)


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"])
    return f"`{place}`: {problem['msg']}" if place else problem["msg"]


def _refuse_unserved(wire: _Body) -> None:
    """Say no to what would otherwise be silently ignored and change what the agent gets."""
    if wire.n not in (None, 1):
        raise _invalid(f"`n` is {wire.n}: one completion per call is served")
    if wire.tools or wire.functions:
        raise _invalid("`tools` is not served yet: use an agent that calls tools in plain text")
    for index, message in enumerate(wire.messages):
        if message.tool_calls or message.role in ("tool", "function"):
            raise _invalid(f"`messages.{index}` belongs to a tool call: tools are not served yet")


def _canonical(wire: Sequence[_Message]) -> tuple[Message, ...]:
    """Opening system texts become one; a later one becomes a user's reminder, as templates know only the first."""
    messages = [Message(_role(message), _flatten(index, message)) for index, message in enumerate(wire)]
    num_opening = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    opening = "\n\n".join(message.text for message in messages[:num_opening])
    head = [Message("system", opening)] if num_opening else []
    return (*head, *map(_as_reminder, messages[num_opening:]))


def _role(message: _Message) -> str:
    return "system" if message.role == "developer" else message.role


def _as_reminder(message: Message) -> Message:
    if message.role != "system":
        return message
    return Message("user", f"<system-reminder>\n{message.text}\n</system-reminder>")


def _flatten(index: int, message: _Message) -> str:
    if message.content is None:
        if message.role == ASSISTANT:
            return ""
        raise _invalid(f"`messages.{index}.content` is missing")
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type != "text":
            raise _invalid(f"`messages.{index}.content` has a part of type `{part.type}`: only `text` is served")
    return "\n".join(part.text for part in message.content)
