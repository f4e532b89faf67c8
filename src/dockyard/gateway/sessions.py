"""A session is one rollout as the gateway sees it: a secret key, the trainer's sampling, and a record of every call.

`TokenSession` samples from an engine by token ids. `text_session.TextSession` talks to an endpoint that returns only
text. The server creates both through a `SessionFactory`.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

import numpy as np

from dockyard.engine.protocol import ContextOverflow, Engine, GenerateRequest, Generation
from dockyard.gateway.accounting import Recording, SessionAccounting, SessionLimits
from dockyard.gateway.matching import PromptPlan, SessionHistory
from dockyard.gateway.protocol import NO_CLIENT_SAMPLING, ClientSampling, ModelReply, RefusedError
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.render.template import TemplateRejectionError
from dockyard.types import IntArray, Prompt, Turn

_ROUNDING = 1e-3
"""How far above 0 rounding may put a logprob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling parameters of a session, whatever its agent requests."""

    seed: int
    temperature: float
    max_new_tokens: int | None
    """The most tokens that one call may sample; an agent may request fewer. None: no limit of the session's own."""


class Session(Protocol):
    """What the server needs of a session."""

    @property
    def label(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def num_held(self) -> int:
        """The approximate number of tokens that the session keeps in memory."""
        ...

    def submit(
        self, prompt: Prompt, max_tokens: int | None, requested: ClientSampling = NO_CLIENT_SAMPLING
    ) -> asyncio.Task[ModelReply]:
        """Start a call. Cancelling the task drops it. The task raises `RefusedError` if there is no reply."""
        ...

    async def count_tokens(self, prompt: Prompt) -> int: ...
    def mark_delivered(self, reply: ModelReply, delivered: bool) -> None:
        """Record whether the agent received this reply or disconnected before."""
        ...

    def note_misuse(self, refused: RefusedError) -> None:
        """Record a call for something that is not served."""
        ...

    def count(self, what: str, amount: int = 1) -> None:
        """Add to the session's statistics."""
        ...

    def close(self) -> Recording:
        """Refuse further calls, cancel those in progress, and return the record."""
        ...


class SessionFactory(Protocol):
    """Creates the sessions of one policy, and provides what the server shows clients about that policy."""

    @property
    def context_length(self) -> int | None:
        """In tokens; None if it is not known."""
        ...

    def token_text(self, token_id: int) -> str: ...
    def new_session(self, label: str, sampling: Sampling, limits: SessionLimits) -> Session: ...


@dataclass(frozen=True, slots=True)
class TokenSessions:
    """Implements `SessionFactory` for an engine that takes and returns token ids."""

    engine: Engine
    renderer: Renderer

    @property
    def context_length(self) -> int:
        return self.engine.context_length

    def token_text(self, token_id: int) -> str:
        return self.renderer.token_text(token_id)

    def new_session(self, label: str, sampling: Sampling, limits: SessionLimits) -> "TokenSession":
        return TokenSession(label, sampling, limits, self.engine, self.renderer)


@dataclass(slots=True, eq=False)
class TokenSession:
    """Implements `Session` for an engine that takes and returns token ids."""

    label: str
    sampling: Sampling
    limits: SessionLimits
    engine: Engine
    renderer: Renderer
    key: str = field(default_factory=lambda: secrets.token_urlsafe(16), repr=False)
    _history: SessionHistory = field(default_factory=SessionHistory)
    _accounting: SessionAccounting = field(init=False)
    _version: int | None = None
    """The weights that the first call used. The session keeps them for as long as the engine has them."""

    def __post_init__(self) -> None:
        self._accounting = SessionAccounting(self.label, self.limits, lambda: self.engine.down_s)

    @property
    def num_held(self) -> int:
        return self._history.num_held

    def submit(
        self, prompt: Prompt, max_tokens: int | None, requested: ClientSampling = NO_CLIENT_SAMPLING
    ) -> asyncio.Task[ModelReply]:
        return self._accounting.submit(lambda number: self._answer(number, prompt, max_tokens, requested))

    async def count_tokens(self, prompt: Prompt) -> int:
        """The length of the prompt in tokens. Nothing is recorded."""
        async with self._accounting.uncounted():
            _, prompt_ids = await self._rendered(self._history.plan(prompt), prompt)
        return len(prompt_ids)

    def mark_delivered(self, reply: ModelReply, delivered: bool) -> None:
        self._history.mark_delivered(reply.number, delivered)

    def note_misuse(self, refused: RefusedError) -> None:
        self._accounting.note_misuse(refused)

    def count(self, what: str, amount: int = 1) -> None:
        self._accounting.count(what, amount)

    def close(self) -> Recording:
        stitched, stats = self._history.stitch()
        return self._accounting.close(stats, segments=stitched.segments, untrusted=stitched.untrusted)

    async def _answer(
        self, number: int, prompt: Prompt, max_tokens: int | None, requested: ClientSampling
    ) -> ModelReply:
        self._accounting.check_stored(self._history.num_bytes)
        started = time.thread_time()
        plan = self._history.plan(prompt)
        self._count_cpu(started)
        plan, prompt_ids = await self._rendered(plan, prompt)
        generation = await self._generate(self._request(number, prompt_ids, max_tokens, requested))
        with self._accounting.engine_errors():
            message = await asyncio.to_thread(self.renderer.message, generation.token_ids, prompt_ids, prompt.tools)
        started = time.thread_time()
        turn = Turn(
            prompt_ids=prompt_ids,
            sampled_ids=generation.token_ids,
            logprobs=generation.logprobs,
            versions=generation.versions,
            finish=generation.finish,
        )
        self._accounting.note_answer(len(turn.sampled_ids))
        # Not the turn itself: replies are kept for retries, and each would hold a whole prompt in memory.
        call = self._history.commit(plan, turn, message)
        usage = len(turn.prompt_ids), len(turn.sampled_ids)
        self._count_cpu(started)
        return ModelReply(number=call.number, turn=call, message=message, usage=usage)

    async def _rendered(self, plan: PromptPlan, prompt: Prompt) -> tuple[PromptPlan, IntArray]:
        # In a thread: a first prompt takes tens of milliseconds, a malicious one much longer.
        plan, prompt_ids, cpu_s = await asyncio.to_thread(self._render, plan, prompt)
        self.count("cpu_us", round(cpu_s * 1e6))
        return plan, prompt_ids

    def _render(self, plan: PromptPlan, prompt: Prompt) -> tuple[PromptPlan, IntArray, float]:
        """Keep the sampled ids and render only the new messages; render everything if that is not possible."""
        started = time.thread_time()
        try:
            ids = None
            if plan.prefix is not None:
                ids = self.renderer.extend(plan.prefix, plan.calls, plan.new, prompt.tools)
                plan = plan if ids is not None else plan.without_splice()
            if ids is None:
                ids = self.renderer.prompt(prompt)
        except TemplateRejectionError as error:
            raise RefusedError(400, "invalid_request", str(error)) from error
        return plan, ids, time.thread_time() - started

    def _count_cpu(self, started: float) -> None:
        self.count("cpu_us", round((time.thread_time() - started) * 1e6))

    def _request(
        self, number: int, prompt_ids: IntArray, max_tokens: int | None, requested: ClientSampling
    ) -> GenerateRequest:
        room = self.engine.context_length - len(prompt_ids)
        if room <= 0:
            raise self._overflow(len(prompt_ids), self.engine.context_length)
        if self._version is None:
            self._version = self.engine.version
        most = self._accounting.max_new_tokens(number, room, self.sampling.max_new_tokens, max_tokens)
        return GenerateRequest(
            prompt_ids=prompt_ids,
            max_new_tokens=most or room,
            temperature=self.sampling.temperature if requested.temperature is None else requested.temperature,
            stop_ids=self.renderer.stop_ids,
            seed=turn_seed(self.sampling.seed, number) if requested.seed is None else requested.seed,
            version=self._version,
            affinity=self.label,
        )

    async def _generate(self, request: GenerateRequest) -> Generation:
        with self._accounting.engine_errors():
            result = await self.engine.generate(request)
        if isinstance(result, ContextOverflow):
            raise self._overflow(result.prompt_tokens, result.context_length)
        if problem := self._implausible(result):
            raise self._accounting.engine_failed(problem)
        return result

    def _implausible(self, result: Generation) -> str | None:
        """Why no engine that samples this model can have returned this; None if it can."""
        ids, logprobs, versions = result.token_ids, result.logprobs, result.versions
        if not len(ids) == len(logprobs) == len(versions):
            return f"{len(ids)} ids came with {len(logprobs)} logprobs and {len(versions)} versions"
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.renderer.max_ids:
            return f"it sampled ids from {ids.min()} to {ids.max()}; the tokenizer has {self.renderer.max_ids} ids"
        if not np.isfinite(logprobs).all() or (logprobs > _ROUNDING).any():
            return f"its logprobs range from {logprobs.min()} to {logprobs.max()}"
        return None

    def _overflow(self, num_prompt: int, context_length: int) -> RefusedError:
        # claude-code recognises an overflow by the numbers, LiteLLM by the words after them.
        return self._accounting.context_overflow(
            f"{num_prompt} tokens > {context_length} maximum: the prompt does not fit, "
            f"this model's maximum context length is {context_length} tokens"
        )


def turn_seed(session_seed: int, number: int) -> int:
    """The seed of one call of a session, derived from the session's seed and the number of the call."""
    digest = blake2b(f"{session_seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # engines take a signed 64-bit integer
