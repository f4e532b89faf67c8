"""A session is one rollout as the gateway sees it: a secret key, the trainer's sampling, and a record of every call."""

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

import numpy as np

from dockyard.engine.protocol import ContextOverflow, Engine, GenerateRequest, Generation
from dockyard.gateway.accounting import Ledger, Recording, SessionLimits
from dockyard.gateway.matching import Forest, PromptPlan
from dockyard.gateway.messages import Prompt
from dockyard.gateway.protocol import NO_WISHES, ClientSampling, RefusedError, Reply
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.render.template import TemplateRejectionError
from dockyard.types import IntArray, Turn

_ROUNDING = 1e-3
"""How far above 0 a logprob may come to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a session is sampled, whatever its agent asks for."""

    seed: int
    temperature: float
    max_new_tokens: int | None
    """Upper limit on one call; an agent may ask for less. None leaves it to the agent and the context."""


class AnySession(Protocol):
    """What the server asks of a session, whatever it samples from."""

    @property
    def label(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def num_held(self) -> int:
        """Tokens that it remembers, roughly."""
        ...

    def submit(
        self, prompt: Prompt, max_tokens: int | None, wishes: ClientSampling = NO_WISHES
    ) -> asyncio.Task[Reply]: ...
    async def count_tokens(self, prompt: Prompt) -> int: ...
    def mark_delivered(self, reply: Reply, delivered: bool) -> None: ...
    def note_misuse(self, refused: RefusedError) -> None: ...
    def count(self, what: str, amount: int = 1) -> None: ...
    def close(self) -> Recording: ...


@dataclass(slots=True, eq=False)
class Session:
    """One rollout's access to the policy. Implements `AnySession`."""

    label: str
    sampling: Sampling
    limits: SessionLimits
    engine: Engine
    renderer: Renderer
    key: str = field(default_factory=lambda: secrets.token_urlsafe(16), repr=False)
    _forest: Forest = field(default_factory=Forest)
    _ledger: Ledger = field(init=False)
    _version: int | None = None
    """Of the weights that answered first: a rollout keeps them as long as the engine has them."""

    def __post_init__(self) -> None:
        self._ledger = Ledger(self.label, self.limits, lambda: self.engine.down_s)

    @property
    def num_held(self) -> int:
        return self._forest.num_held

    def submit(self, prompt: Prompt, max_tokens: int | None, wishes: ClientSampling = NO_WISHES) -> asyncio.Task[Reply]:
        """Start a call. Cancelling the task drops it; the task raises `RefusedError` if there is no answer."""
        return self._ledger.submit(lambda number: self._answer(number, prompt, max_tokens, wishes))

    async def count_tokens(self, prompt: Prompt) -> int:
        """How long the prompt would be. Nothing is recorded."""
        _, prompt_ids = await self._ledger.aside(lambda: self._rendered(self._forest.plan(prompt), prompt))
        return len(prompt_ids)

    def mark_delivered(self, reply: Reply, delivered: bool) -> None:
        """Whether the agent got this reply, or hung up before."""
        (self._forest.mark_delivered if delivered else self._forest.mark_undelivered)(reply.number)

    def note_misuse(self, refused: RefusedError) -> None:
        """The agent asked for something that no session serves."""
        self._ledger.note_misuse(refused)

    def count(self, what: str, amount: int = 1) -> None:
        """Add to the session's statistics."""
        self._ledger.count(what, amount)

    def close(self) -> Recording:
        """Refuse calls from now on, drop those under way, and hand out the record."""
        stitched, stats = self._forest.stitch()
        return self._ledger.close(stats, segments=stitched.segments, untrusted=stitched.untrusted)

    async def _answer(self, number: int, prompt: Prompt, max_tokens: int | None, wishes: ClientSampling) -> Reply:
        self._ledger.check_stored(self._forest.num_bytes)
        started = time.thread_time()
        plan = self._forest.plan(prompt)
        self._count_cpu(started)
        plan, prompt_ids = await self._rendered(plan, prompt)
        generation = await self._generate(self._request(number, prompt_ids, max_tokens, wishes))
        with self._ledger.engine_at_work():
            message = await asyncio.to_thread(self.renderer.message, generation.token_ids, prompt_ids, prompt.tools)
        started = time.thread_time()
        turn = Turn(
            prompt_ids=prompt_ids,
            sampled_ids=generation.token_ids,
            logprobs=generation.logprobs,
            versions=generation.versions,
            finish=generation.finish,
        )
        self._ledger.note_answer(len(turn.sampled_ids))
        # Not the turn itself: an answer is kept for an agent that asks again, and each would keep a whole prompt.
        call = self._forest.commit(plan, turn, message)
        usage = len(turn.prompt_ids), len(turn.sampled_ids)
        self._count_cpu(started)
        return Reply(number=call.number, turn=call, message=message, usage=usage)

    async def _rendered(self, plan: PromptPlan, prompt: Prompt) -> tuple[PromptPlan, IntArray]:
        # In a thread: a first prompt takes tens of milliseconds, a hostile one far longer.
        plan, prompt_ids, cpu_s = await asyncio.to_thread(self._render, plan, prompt)
        self.count("cpu_us", round(cpu_s * 1e6))
        return plan, prompt_ids

    def _render(self, plan: PromptPlan, prompt: Prompt) -> tuple[PromptPlan, IntArray, float]:
        """Keep what was sampled as it was sampled and render only what is new; render everything where that fails."""
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
        self, number: int, prompt_ids: IntArray, max_tokens: int | None, wishes: ClientSampling
    ) -> GenerateRequest:
        room = self.engine.context_length - len(prompt_ids)
        if room <= 0:
            raise self._overflown(len(prompt_ids), self.engine.context_length)
        if self._version is None:
            self._version = self.engine.version
        return GenerateRequest(
            prompt_ids=prompt_ids,
            max_new_tokens=self._ledger.max_new_tokens(number, room, self.sampling.max_new_tokens, max_tokens) or room,
            temperature=self.sampling.temperature if wishes.temperature is None else wishes.temperature,
            stop_ids=self.renderer.stop_ids,
            seed=turn_seed(self.sampling.seed, number) if wishes.seed is None else wishes.seed,
            version=self._version,
            affinity=self.label,
        )

    async def _generate(self, request: GenerateRequest) -> Generation:
        with self._ledger.engine_at_work():
            result = await self.engine.generate(request)
        if isinstance(result, ContextOverflow):
            raise self._overflown(result.prompt_tokens, result.context_length)
        lengths = len(result.token_ids), len(result.logprobs), len(result.versions)
        if len(set(lengths)) > 1:
            raise self._ledger.engine_failed("{} ids came with {} logprobs and {} versions".format(*lengths))
        if problem := self._nonsense(result):
            raise self._ledger.engine_failed(problem)
        return result

    def _nonsense(self, result: Generation) -> str | None:
        """What no engine that samples this model can have drawn."""
        ids, logprobs = result.token_ids, result.logprobs
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.renderer.max_ids:
            return f"it sampled ids from {ids.min()} to {ids.max()}, and the tokenizer has {self.renderer.max_ids}"
        if not np.isfinite(logprobs).all() or (logprobs > _ROUNDING).any():
            return f"its logprobs go from {logprobs.min()} to {logprobs.max()}"
        return None

    def _overflown(self, num_prompt: int, context_length: int) -> RefusedError:
        # claude-code tells an overflow by the numbers, LiteLLM by the words after them.
        return self._ledger.overflown(
            f"{num_prompt} tokens > {context_length} maximum: the prompt does not fit, "
            f"this model's maximum context length is {context_length} tokens"
        )


def turn_seed(session_seed: int, number: int) -> int:
    """The seed of a session's call: the same session seed and number always give the same, others another."""
    digest = blake2b(f"{session_seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # engines take a signed 64-bit integer
