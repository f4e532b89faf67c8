"""Sessions on an endpoint that returns no token ids: text in, text out, recorded as text.

Such a rollout cannot be trained on token by token as it was sampled. The agent sees no difference: it uses its own
dialect, and the endpoint's tool-call ids are passed on.
"""

import asyncio
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from dockyard.chat_format import chat_message
from dockyard.engine.protocol import Engine
from dockyard.gateway.accounting import Recording, SessionAccounting, SessionLimits
from dockyard.gateway.echo import EndpointEcho
from dockyard.gateway.endpoint_answer import EndpointAnswer, reply_message
from dockyard.gateway.protocol import NO_CLIENT_SAMPLING, ClientSampling, ModelReply, RefusedError, dump
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.sessions import Sampling, SessionFactory, TokenSessions, turn_seed
from dockyard.types import Exchange, Finish, Json, Message, Prompt, Turn

_BYTES_PER_TOKEN = 4
_OVERFLOW = re.compile(r"context.?length|context.?window|prompt is too long|too many tokens", re.IGNORECASE)


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
        return await self._accounting.run_uncounted(lambda: self._estimated(prompt))

    async def _estimated(self, prompt: Prompt) -> int:
        return max(1, len(dump([_chat_messages(prompt.messages), prompt.tools])) // _BYTES_PER_TOKEN)

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
        body = self._body(prompt)
        body["temperature"] = self.sampling.temperature if requested.temperature is None else requested.temperature
        body["seed"] = turn_seed(self.sampling.seed, number) if requested.seed is None else requested.seed
        limit = self._accounting.max_new_tokens(number, self.sampling.max_new_tokens, max_tokens)
        with self._accounting.engine_errors():
            answer = EndpointAnswer.model_validate(await self._chat(body, limit))
            wire, finish = answer.choices[0].message, answer.choices[0].finish
            message = self.echo.record(body["messages"], wire) if self.echo else reply_message(wire)
        usage = answer.usage.tokens if answer.usage else (await self._estimated(prompt), _estimated_tokens(message))
        self._accounting.note_answer(usage[1])
        self._record(prompt, message, finish, usage)
        number = len(self._exchanges) - 1
        return ModelReply(number=number, turn=_empty_turn(finish), message=message, usage=usage)

    def _record(self, prompt: Prompt, reply: Message, finish: Finish, usage: tuple[int, int]) -> None:
        num_prompt, num_sampled = usage
        shared = self._with_shared_messages(prompt)
        self._exchanges.append(
            Exchange(prompt=shared, reply=reply, finish=finish, num_prompt=num_prompt, num_sampled=num_sampled)
        )

    def _body(self, prompt: Prompt) -> Json:
        messages = self.echo.restore(prompt) if self.echo else _chat_messages(prompt.messages)
        tools: Json = {"tools": list(prompt.tools)} if prompt.tools else {}
        return {"messages": messages, **tools}

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


def _empty_turn(finish: Finish) -> Turn:
    ids, logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
    return Turn(prompt_ids=ids, sampled_ids=ids, logprobs=logprobs, versions=ids, finish=finish)


def _estimated_tokens(message: Message) -> int:
    calls = "".join(call.name + call.arguments_json() for call in message.calls)
    return max(1, len((message.reasoning + message.text + calls).encode()) // _BYTES_PER_TOKEN)


def _chat_messages(messages: Sequence[Message]) -> list[Json]:
    return [chat_message(message) for message in messages]
