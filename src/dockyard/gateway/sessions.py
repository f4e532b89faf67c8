"""A session is one rollout as the gateway sees it: a secret key, the trainer's sampling, and a record of every call."""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from dockyard.engine import ContextOverflow, Engine, GenerateRequest, Generation
from dockyard.gateway.forest import Forest, Message, Plan
from dockyard.gateway.render import Renderer, TemplateRejectionError
from dockyard.types import IntArray, Segment, Turn

log = logging.getLogger(__name__)


class RefusedError(Exception):
    """A call that gets no answer. Each dialect says it in its own words."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def unknown_key() -> RefusedError:
    """The one answer to a key that is missing, wrong or expired, so that it tells nobody which."""
    return RefusedError(401, "invalid_api_key", "the API key is not valid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a session is sampled, whatever its agent asks for."""

    seed: int
    temperature: float
    max_new_tokens: int
    """Upper limit on one call; an agent may ask for less."""
    max_calls: int | None
    """Calls after this many are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A finished call, recorded and ready to be sent."""

    number: int
    """The forest's name for it."""
    turn: Turn
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a closed session leaves behind."""

    segments: tuple[Segment, ...]
    stats: dict[str, int]
    engine_failure: str | None
    """What the engine raised, if it ever did."""
    overflowed: bool
    """Some prompt did not fit the context."""
    calls: int


@dataclass(slots=True, eq=False)
class Session:
    """One rollout's access to the policy."""

    label: str
    sampling: Sampling
    engine: Engine
    renderer: Renderer
    key: str = field(default_factory=lambda: secrets.token_urlsafe(16), repr=False)
    closed: bool = False
    _forest: Forest = field(default_factory=Forest)
    _in_flight: set[asyncio.Task[Reply]] = field(default_factory=set[asyncio.Task[Reply]])
    _counts: Counter[str] = field(default_factory=Counter[str])
    _num_calls: int = 0
    _engine_failure: str | None = None
    _overflowed: bool = False

    def submit(self, messages: Sequence[Message], max_tokens: int | None) -> asyncio.Task[Reply]:
        """Start a call. Cancelling the task drops it; the task raises `RefusedError` if there is no answer."""
        task = asyncio.create_task(self._sample(messages, max_tokens))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        return task

    def mark_undelivered(self, reply: Reply) -> None:
        """The agent hung up before it had this reply."""
        self._forest.mark_undelivered(reply.number)

    def close(self) -> Recording:
        """Refuse calls from now on, drop those under way, and hand out the record."""
        self.closed = True
        for task in self._in_flight:
            task.cancel()
        segments, stats = self._forest.stitch()
        return Recording(
            segments=segments,
            stats=stats | self._counts | {"calls": self._num_calls},
            engine_failure=self._engine_failure,
            overflowed=self._overflowed,
            calls=self._num_calls,
        )

    async def _sample(self, messages: Sequence[Message], max_tokens: int | None) -> Reply:
        number = self._admit()
        # In a thread: a first prompt takes tens of milliseconds, a hostile one far longer.
        plan, prompt_ids = await asyncio.to_thread(self._prompt, self._forest.plan(messages), messages)
        generation = await self._generate(self._request(number, prompt_ids, max_tokens))
        turn = Turn(
            prompt_ids=prompt_ids,
            sampled_ids=generation.token_ids,
            logprobs=generation.logprobs,
            versions=generation.versions,
            finish=generation.finish,
        )
        text = self.renderer.text(turn.sampled_ids)
        return Reply(number=self._forest.commit(plan, turn, text), turn=turn, text=text)

    def _admit(self) -> int:
        """Number this call, from 0."""
        if self.closed:
            raise unknown_key()
        limit = self.sampling.max_calls
        if limit is not None and self._num_calls >= limit:
            self._counts["refused"] += 1
            # Not 429: clients would try again, and codex dies of it.
            raise RefusedError(
                403, "call_limit_reached", f"this session may make {limit} model calls and has made them"
            )
        self._num_calls += 1
        return self._num_calls - 1

    def _prompt(self, plan: Plan, messages: Sequence[Message]) -> tuple[Plan, IntArray]:
        """Keep what was sampled as it was sampled and render only what is new; render everything where that fails."""
        try:
            if plan.prefix is not None:
                suffix = self.renderer.suffix(plan.new)
                if suffix is not None:
                    return plan, np.concatenate([plan.prefix, self.renderer.close(plan.prefix), suffix])
                plan = plan.without_splice()
            return plan, self.renderer.prompt(messages)
        except TemplateRejectionError as error:
            raise RefusedError(400, "invalid_request", str(error)) from error

    def _request(self, number: int, prompt_ids: IntArray, max_tokens: int | None) -> GenerateRequest:
        limits = [self.sampling.max_new_tokens, self.engine.context_length - len(prompt_ids)]
        max_new_tokens = min(limits if max_tokens is None else [*limits, max_tokens])
        if max_new_tokens < 1:
            raise self._overflow(len(prompt_ids), self.engine.context_length)
        return GenerateRequest(
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            temperature=self.sampling.temperature,
            stop_ids=self.renderer.stop_ids,
            seed=turn_seed(self.sampling.seed, number),
        )

    async def _generate(self, request: GenerateRequest) -> Generation:
        try:
            result = await self.engine.generate(request)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise self._engine_failed("the engine dropped a call that nobody cancelled") from error
            self._counts["aborted"] += 1
            raise
        except Exception as error:  # whatever an engine raises is its failure, and the agent must get an answer
            raise self._engine_failed(f"{type(error).__name__}: {error}") from error
        if isinstance(result, ContextOverflow):
            raise self._overflow(result.prompt_tokens, result.context_length)
        lengths = len(result.token_ids), len(result.logprobs), len(result.versions)
        if len(set(lengths)) > 1:
            raise self._engine_failed("{} ids came with {} logprobs and {} versions".format(*lengths))
        return result

    def _engine_failed(self, what: str) -> RefusedError:
        self._engine_failure = what
        log.warning("the engine failed in session %s: %s", self.label, what)
        return RefusedError(502, "engine_failure", "the engine failed")

    def _overflow(self, num_prompt: int, context_length: int) -> RefusedError:
        self._overflowed = True
        return RefusedError(
            400,
            "context_length_exceeded",
            # LiteLLM tells an overflow by the middle of this sentence.
            f"The prompt has {num_prompt} tokens, but this model's maximum context length is {context_length} tokens.",
        )


def turn_seed(session_seed: int, number: int) -> int:
    """The seed of a session's call: the same session seed and number always give the same, others another."""
    digest = blake2b(f"{session_seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # engines take a signed 64-bit integer
