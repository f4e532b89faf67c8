"""A session in front of an endpoint that returns no token ids: text in, text out, recorded as text.

Nothing token-exact can be trained from it. The agent notices no difference: it speaks its own dialect, and the ids that
the endpoint gave to tool calls stay. `Recall` sends the endpoint its own earlier turns back word for word, for
endpoints that recognise a history by its messages: an agent that trims a turn or rewrites arguments would otherwise
start a new history there.
"""

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel, Field

from dockyard.gateway.accounting import Exchange, Ledger, Recording, SessionLimits
from dockyard.gateway.matching import same_message, schema_defaults
from dockyard.gateway.messages import ASSISTANT, Message, Prompt, ToolCall
from dockyard.gateway.protocol import NO_WISHES, ClientSampling, RefusedError, Reply, dump, strict_object
from dockyard.gateway.sessions import Sampling, turn_seed
from dockyard.types import Finish, Json, Turn


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


@dataclass(frozen=True, slots=True)
class _EarlierTurn:
    told: list[Json]
    """What it answers."""
    wire: Json
    """In the endpoint's words."""
    message: Message
    """As the agent got it."""


class Recall:
    """What one session's endpoint said."""

    def __init__(self) -> None:
        self._said: list[_EarlierTurn] = []
        self._ids: dict[str, str] = {}
        """The endpoint's for each call, by the ones that agents get."""

    def told(self, prompt: Prompt) -> list[Json]:
        """The prompt's messages, with every turn that the agent still has as the endpoint said it."""
        defaults = {tool["function"]["name"]: schema_defaults(tool) for tool in prompt.tools}
        told: list[Json] = []
        for message in prompt.messages:
            told.append(self._recalled(told, message, defaults) or chat_message(self._with_own_ids(message)))
        return told

    def heard(self, told: list[Json], wire: Json) -> Message:
        """An answer as the agent gets it: its calls have ids that no other turn's have, as agents take for granted."""
        message = said_message(wire)
        calls = tuple(replace(call, id=f"call_{secrets.token_hex(16)}") for call in message.calls)
        self._ids |= {ours.id: theirs.id for ours, theirs in zip(calls, message.calls, strict=True)}
        self._said.append(_EarlierTurn(told, wire, replace(message, calls=calls)))
        return self._said[-1].message

    def _recalled(self, told: list[Json], message: Message, defaults: Mapping[str, Json]) -> Json | None:
        if message.role != ASSISTANT:
            return None
        said = (one for one in reversed(self._said) if same_message(one.message, message, defaults))
        return next((one.wire for one in said if one.told == told), None)

    def _with_own_ids(self, message: Message) -> Message:
        calls = tuple(replace(call, id=self._ids.get(call.id, call.id)) for call in message.calls)
        return replace(message, calls=calls, call_id=self._ids.get(message.call_id, message.call_id))


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
    limits: SessionLimits
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

    def submit(self, prompt: Prompt, max_tokens: int | None, wishes: ClientSampling = NO_WISHES) -> asyncio.Task[Reply]:
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

    async def _answer(self, number: int, prompt: Prompt, max_tokens: int | None, wishes: ClientSampling) -> Reply:
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
