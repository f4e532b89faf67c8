"""A session in front of an endpoint that returns no token ids: text in, text out, recorded as text.

Nothing exact can be trained from it. The agent notices no difference: it speaks its own dialect, and the ids that the
endpoint gives to tool calls stay.
"""

import asyncio
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from dockyard.gateway.calls import RefusedError, Reply, dump
from dockyard.gateway.history import Json, Message, Prompt
from dockyard.gateway.ledger import Exchange, Ledger, Limits, Recording
from dockyard.gateway.recall import Recall
from dockyard.gateway.sessions import Sampling, turn_seed
from dockyard.gateway.text_wire import ChatAnswer, chat_message, said_message
from dockyard.gateway.wishes import NO_WISHES, Wishes
from dockyard.types import Finish, Turn

_BYTES_PER_TOKEN = 4
_OVERFLOW = re.compile(r"context.?length|context.?window|prompt is too long|too many tokens", re.IGNORECASE)


@runtime_checkable
class TextSource(Protocol):
    """An endpoint that answers chat bodies."""

    @property
    def down_s(self) -> float:
        """For how many seconds in all it has been out of reach so far."""
        ...

    async def chat(self, body: Json) -> Json:
        """A chat-completions body's answer. Raises whatever went wrong, in words of the endpoint's own."""
        ...


@dataclass(slots=True, eq=False)
class TextSession:
    """One rollout's access to an endpoint. Implements `AnySession`."""

    label: str
    sampling: Sampling
    limits: Limits
    source: TextSource
    recall: Recall | None = None
    """For a source that must get its own turns back word for word."""
    key: str = field(default_factory=lambda: secrets.token_urlsafe(16), repr=False)
    _ledger: Ledger = field(init=False)
    _exchanges: list[Exchange] = field(default_factory=list[Exchange])
    _limit_name: str = "max_tokens"
    """What the endpoint calls the limit on an answer's tokens."""

    def __post_init__(self) -> None:
        self._ledger = Ledger(self.label, self.limits, lambda: self.source.down_s)

    @property
    def num_held(self) -> int:
        return sum(sum(exchange.usage) for exchange in self._exchanges)

    def submit(self, prompt: Prompt, max_tokens: int | None, wishes: Wishes = NO_WISHES) -> asyncio.Task[Reply]:
        """Start a call. Cancelling the task drops it; the task raises `RefusedError` if there is no answer."""
        return self._ledger.submit(lambda number: self._answer(number, prompt, max_tokens, wishes))

    async def count_tokens(self, prompt: Prompt) -> int:
        """About how long the prompt would be: a quarter of its bytes. The true tokenizer is not here."""
        return await self._ledger.aside(lambda: self._estimated(prompt))

    async def _estimated(self, prompt: Prompt) -> int:
        return max(1, len(dump([_chat_messages(prompt.messages), prompt.tools])) // _BYTES_PER_TOKEN)

    def mark_delivered(self, reply: Reply, delivered: bool) -> None:
        """Whether the agent got this reply, or hung up before."""
        self._exchanges[reply.number] = replace(self._exchanges[reply.number], delivered=delivered)

    def note_misuse(self, refused: RefusedError) -> None:
        """The agent asked for something that no session serves."""
        self._ledger.note_misuse(refused)

    def count(self, what: str, amount: int = 1) -> None:
        """Add to the session's statistics."""
        self._ledger.count(what, amount)

    def close(self) -> Recording:
        """Refuse calls from now on, drop those under way, and hand out the record."""
        stats = {
            "prompt_tokens": sum(exchange.usage[0] for exchange in self._exchanges),
            "sampled_tokens": sum(exchange.usage[1] for exchange in self._exchanges),
            "undelivered": sum(not exchange.delivered for exchange in self._exchanges),
        }
        return self._ledger.close(stats, exchanges=tuple(self._exchanges))

    async def _answer(self, number: int, prompt: Prompt, max_tokens: int | None, wishes: Wishes) -> Reply:
        body = self._body(prompt)
        body["temperature"] = self.sampling.temperature if wishes.temperature is None else wishes.temperature
        body["seed"] = turn_seed(self.sampling.seed, number) if wishes.seed is None else wishes.seed
        limit = self._ledger.max_new_tokens(number, self.sampling.max_new_tokens, max_tokens)
        with self._ledger.engine_at_work():
            answer = ChatAnswer.model_validate(await self._chat(body, limit))
            wire, finish = answer.choices[0].message, answer.choices[0].finish
            message = self.recall.heard(body["messages"], wire) if self.recall else said_message(wire)
        usage = answer.usage.tokens if answer.usage else (await self._estimated(prompt), _num_tokens(message))
        self._ledger.note_answer(usage[1])
        exchange = Exchange(prompt=self._compact(prompt), reply=message, finish=finish, usage=usage)
        self._exchanges.append(exchange)
        return Reply(number=len(self._exchanges) - 1, turn=_empty_turn(finish), message=message, usage=usage)

    def _body(self, prompt: Prompt) -> Json:
        messages = self.recall.told(prompt) if self.recall else _chat_messages(prompt.messages)
        tools: Json = {"tools": list(prompt.tools)} if prompt.tools else {}
        return {"messages": messages, **tools}

    async def _chat(self, body: Json, limit: int | None) -> Json:
        """Ask the endpoint. Its words for an overflow become ours, so that agents know to compact."""
        limited = body if limit is None else body | {self._limit_name: limit}
        try:
            return await self.source.chat(limited)
        except Exception as error:
            if "max_completion_tokens" in str(error) and self._limit_name == "max_tokens":
                self._limit_name = "max_completion_tokens"  # OpenAI's newer models insist
                return await self._chat(body, limit)
            if _OVERFLOW.search(str(error)):
                raise self._ledger.overflown(str(error)) from error
            raise

    def _compact(self, prompt: Prompt) -> Prompt:
        """The same prompt with what it repeats from the one before it stored once."""
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


def _num_tokens(message: Message) -> int:
    calls = "".join(call.name + call.arguments_json() for call in message.calls)
    return max(1, len((message.reasoning + message.text + calls).encode()) // _BYTES_PER_TOKEN)


def _chat_messages(messages: Sequence[Message]) -> list[Json]:
    return [chat_message(message) for message in messages]
