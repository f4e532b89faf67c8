"""Sessions on an endpoint that returns no token ids: text in, text out, recorded as text.

Such a rollout cannot be trained on token by token as it was sampled. The agent sees no difference: it uses its own
dialect. Some endpoints recognise a history by its messages, and would start a new one if an agent trims a turn or
rewrites its arguments. `EndpointEcho` sends such an endpoint its own earlier turns back word for word.
"""

import asyncio
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel, Field

from dockyard.chat_format import chat_message, replace_surrogates, strict_object
from dockyard.engine.protocol import Engine
from dockyard.gateway.accounting import Recording, SessionAccounting, SessionLimits
from dockyard.gateway.matching import ToolDefaults, same_message, tool_defaults
from dockyard.gateway.protocol import NO_CLIENT_SAMPLING, ClientSampling, ModelReply, RefusedError, dump
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.sessions import Sampling, SessionFactory, TokenSessions, turn_seed
from dockyard.types import ASSISTANT, Exchange, Finish, Json, Message, Prompt, ToolCall, Turn

_BYTES_PER_TOKEN = 4
_OVERFLOW = re.compile(r"context.?length|context.?window|prompt is too long|too many tokens", re.IGNORECASE)


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


class _Choice(BaseModel):
    message: Json
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class _Answer(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


def _reply_message(wire: Json) -> Message:
    """Parse the endpoint's message. A call whose arguments are not valid JSON becomes text: agents crash on it."""
    reply = _ReplyMessage.model_validate(wire)
    calls: list[ToolCall] = []
    content = reply.content or ""
    texts = [content if isinstance(content, str) else "\n".join(part.text or "" for part in content)]
    for call in reply.tool_calls or ():
        name, arguments = call.function.name, strict_object(call.function.arguments or "{}")
        if arguments is None:
            texts.append(f"<tool_call>\n{name}: {call.function.arguments}\n</tool_call>")
        else:
            calls.append(ToolCall(call.id or _new_call_id(), replace_surrogates(name), arguments))
    reasoning = reply.reasoning_content or reply.reasoning or ""
    text = "\n".join(text for text in texts if text)
    return Message(ASSISTANT, replace_surrogates(text), replace_surrogates(reasoning), tuple(calls))


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class _EarlierTurn:
    sent: list[Json]
    """The messages that it answers."""
    wire: Json
    """The reply as the endpoint wrote it."""
    message: Message
    """The reply as the agent received it."""


class EndpointEcho:
    """The turns of one session as its endpoint wrote them."""

    def __init__(self) -> None:
        self._turns: list[_EarlierTurn] = []
        self._endpoint_ids: dict[str, str] = {}
        """Maps the call ids that the agent has to those of the endpoint."""

    def restore(self, prompt: Prompt) -> list[Json]:
        """Convert the prompt's messages, with each turn that the agent still has as the endpoint wrote it."""
        defaults = tool_defaults(prompt.tools)
        restored: list[Json] = []
        for message in prompt.messages:
            wire = self._find(restored, message, defaults)
            restored.append(chat_message(self._with_endpoint_ids(message)) if wire is None else wire)
        return restored

    def record(self, sent: list[Json], wire: Json) -> Message:
        """Remember an answer, and return it with new call ids: agents expect ids to be unique in a session."""
        message = _reply_message(wire)
        calls = tuple(replace(call, id=_new_call_id()) for call in message.calls)
        self._endpoint_ids |= {ours.id: theirs.id for ours, theirs in zip(calls, message.calls, strict=True)}
        message = replace(message, calls=calls)
        self._turns.append(_EarlierTurn(sent, wire, message))
        return message

    def _find(self, restored: list[Json], message: Message, defaults: ToolDefaults) -> Json | None:
        if message.role != ASSISTANT:
            return None
        same = (turn for turn in reversed(self._turns) if same_message(turn.message, message, defaults))
        return next((turn.wire for turn in same if turn.sent == restored), None)

    def _with_endpoint_ids(self, message: Message) -> Message:
        ids = self._endpoint_ids
        calls = tuple(replace(call, id=ids.get(call.id, call.id)) for call in message.calls)
        return replace(message, calls=calls, call_id=ids.get(message.call_id, message.call_id))


@runtime_checkable
class TextSource(Protocol):
    """An endpoint that answers Chat Completions requests."""

    @property
    def down_s(self) -> float:
        """Total seconds so far in which it could not be reached."""
        ...

    async def chat(self, body: Json) -> Json:
        """Answer a Chat Completions request. Raises whatever went wrong, with the endpoint's own message."""
        ...


def session_factory(source: Engine | TextSource, renderer: Renderer | None) -> SessionFactory:
    """Choose between text mode and token mode by what `source` is. An engine needs a renderer; a text source none."""
    if isinstance(source, TextSource):
        return TextSessions(source)
    assert renderer is not None, "an engine that takes token ids needs a renderer"
    return TokenSessions(source, renderer)


@dataclass(frozen=True, slots=True)
class TextSessions:
    """Implements `SessionFactory` for an endpoint that returns no token ids."""

    source: TextSource

    @property
    def context_length(self) -> None:
        return None

    def token_text(self, token_id: int) -> str:
        return str(token_id)

    def new_session(self, label: str, sampling: Sampling, limits: SessionLimits) -> "TextSession":
        return TextSession(label, sampling, limits, self.source)


@dataclass(slots=True, eq=False)
class TextSession:
    """Implements `Session` for an endpoint that returns no token ids."""

    label: str
    sampling: Sampling
    limits: SessionLimits
    source: TextSource
    echo: EndpointEcho | None = None
    """For a source that must receive its own turns word for word."""
    key: str = field(default_factory=lambda: secrets.token_urlsafe(16), repr=False)
    _accounting: SessionAccounting = field(init=False)
    _exchanges: list[Exchange] = field(default_factory=list[Exchange])
    _limit_name: str = "max_tokens"
    """The endpoint's name for the limit on sampled tokens."""

    def __post_init__(self) -> None:
        self._accounting = SessionAccounting(self.label, self.limits, lambda: self.source.down_s)

    @property
    def num_held(self) -> int:
        return sum(exchange.num_prompt + exchange.num_sampled for exchange in self._exchanges)

    def submit(
        self, prompt: Prompt, max_tokens: int | None, requested: ClientSampling = NO_CLIENT_SAMPLING
    ) -> asyncio.Task[ModelReply]:
        return self._accounting.submit(lambda number: self._answer(number, prompt, max_tokens, requested))

    async def count_tokens(self, prompt: Prompt) -> int:
        """Estimate the length of the prompt as a quarter of its bytes: the endpoint's tokenizer is not known."""
        async with self._accounting.uncounted():
            return _estimated_prompt(prompt)

    def mark_delivered(self, reply: ModelReply, delivered: bool) -> None:
        self._exchanges[reply.number] = replace(self._exchanges[reply.number], delivered=delivered)

    def note_misuse(self, refused: RefusedError) -> None:
        self._accounting.note_misuse(refused)

    def count(self, what: str, amount: int = 1) -> None:
        self._accounting.count(what, amount)

    def close(self) -> Recording:
        stats = {
            "prompt_tokens": sum(exchange.num_prompt for exchange in self._exchanges),
            "sampled_tokens": sum(exchange.num_sampled for exchange in self._exchanges),
            "undelivered": sum(not exchange.delivered for exchange in self._exchanges),
        }
        return self._accounting.close(stats, exchanges=tuple(self._exchanges))

    async def _answer(
        self, number: int, prompt: Prompt, max_tokens: int | None, requested: ClientSampling
    ) -> ModelReply:
        messages = self.echo.restore(prompt) if self.echo else _chat_messages(prompt.messages)
        body: Json = {"messages": messages, **({"tools": list(prompt.tools)} if prompt.tools else {})}
        body["temperature"] = self.sampling.temperature if requested.temperature is None else requested.temperature
        body["seed"] = turn_seed(self.sampling.seed, number) if requested.seed is None else requested.seed
        limit = self._accounting.max_new_tokens(number, self.sampling.max_new_tokens, max_tokens)
        with self._accounting.engine_errors():
            answer = _Answer.model_validate(await self._chat(body, limit))
            wire = answer.choices[0].message
            message = self.echo.record(messages, wire) if self.echo else _reply_message(wire)
        used = answer.usage
        exchange = Exchange(
            prompt=self._with_shared_messages(prompt),
            reply=message,
            finish=Finish.LENGTH if answer.choices[0].finish_reason == "length" else Finish.STOP,
            num_prompt=used.prompt_tokens if used else _estimated_prompt(prompt),
            num_sampled=used.completion_tokens if used else _estimated_reply(message),
        )
        self._accounting.note_answer(exchange.num_sampled)
        self._exchanges.append(exchange)
        return _model_reply(len(self._exchanges) - 1, exchange)

    async def _chat(self, body: Json, limit: int | None) -> Json:
        """Send the request. The endpoint's message for an overflow becomes ours, so that agents know to compact."""
        limited = body if limit is None else body | {self._limit_name: limit}
        try:
            return await self.source.chat(limited)
        except Exception as error:
            if "max_completion_tokens" in str(error) and self._limit_name == "max_tokens":
                self._limit_name = "max_completion_tokens"  # OpenAI's newer models require it
                return await self._chat(body, limit)
            if _OVERFLOW.search(str(error)):
                raise self._accounting.context_overflow(str(error)) from error
            raise

    def _with_shared_messages(self, prompt: Prompt) -> Prompt:
        """The same prompt, with the objects of the previous one where it repeats them."""
        if not self._exchanges:
            return prompt
        before = self._exchanges[-1].prompt
        pairs = zip(prompt.messages, before.messages, strict=False)
        known = tuple(old if old == new else new for new, old in pairs)
        tools = before.tools if before.tools == prompt.tools else prompt.tools
        return replace(prompt, messages=known + prompt.messages[len(known) :], tools=tools)


def _model_reply(number: int, exchange: Exchange) -> ModelReply:
    none, logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
    turn = Turn(prompt_ids=none, sampled_ids=none, logprobs=logprobs, versions=none, finish=exchange.finish)
    usage = exchange.num_prompt, exchange.num_sampled
    return ModelReply(number=number, turn=turn, message=exchange.reply, usage=usage)


def _estimated_prompt(prompt: Prompt) -> int:
    return max(1, len(dump([_chat_messages(prompt.messages), prompt.tools])) // _BYTES_PER_TOKEN)


def _estimated_reply(message: Message) -> int:
    calls = "".join(call.name + call.arguments_json() for call in message.calls)
    return max(1, len((message.reasoning + message.text + calls).encode()) // _BYTES_PER_TOKEN)


def _chat_messages(messages: Sequence[Message]) -> list[Json]:
    return [chat_message(message) for message in messages]
