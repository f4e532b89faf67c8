"""A session's books: what it may use of the policy, what it has used, what went wrong, and the record it leaves."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from dockyard.gateway.messages import Message, Prompt
from dockyard.gateway.protocol import OVERFLOW, RefusedError, Reply
from dockyard.types import Finish, Segment

log = logging.getLogger(__name__)


def unknown_key() -> RefusedError:
    """The one answer to a key that is missing, wrong or expired, so that it tells nobody which."""
    return RefusedError(401, "invalid_api_key", "the API key is not valid")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What one session may use. The policy can read its agent's key, so none of this is left to the agent."""

    max_calls: int | None = None
    max_sampled_tokens: int | None = None
    max_seconds: float | None = None
    """From the session's start; also for calls under way."""
    max_concurrency: int = 8
    """Calls sampled at the same time; others wait their turn."""
    max_waiting: int = 64
    max_stored_bytes: int = 256 * 2**20
    """Of the messages that the session's record holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A call whose token ids nobody knows: what was asked and what came back, as text."""

    prompt: Prompt
    reply: Message
    finish: Finish
    usage: tuple[int, int]
    """Prompt and sampled tokens as the endpoint counted them."""
    delivered: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a closed session leaves behind."""

    segments: tuple[Segment, ...] = ()
    untrusted: tuple[Segment, ...] = ()
    """From calls that the harness did not make: recorded, not trained."""
    exchanges: tuple[Exchange, ...] = ()
    """In text mode, where there are no segments."""
    stats: dict[str, int]
    calls: int
    """Model calls that were begun."""
    answered: int
    """Calls that the policy answered."""
    engine_failure: str | None = None
    """What the engine raised, if no call was answered after it."""
    engine_down_s: float = 0.0
    """For how long the engine was out of reach in the session's time."""
    overflow: str | None = None
    """The refusal of a prompt that did not fit the context, if no call was answered after it."""
    limit: str | None = None
    """The refusal of a call past a limit, if there was one."""
    misuse: str | None = None
    """The refusal of a call for something else than this policy, if there was one."""


class Ledger:
    """Keeps one session's books."""

    def __init__(self, label: str, limits: SessionLimits, down_s: Callable[[], float] = lambda: 0.0) -> None:
        """`down_s` says for how long in all the engine has been out of reach."""
        self.closed = False
        self.num_answered = 0
        self._label = label
        self._limits = limits
        self._started = time.monotonic()
        self._down_s, self._down_before_s = down_s, down_s()
        self._turns = asyncio.Semaphore(limits.max_concurrency)
        self._in_flight: set[asyncio.Task[Reply]] = set()
        self._counts: Counter[str] = Counter()
        self._num_calls = 0
        self._num_sampled = 0
        self._granted: dict[int, int] = {}
        """Tokens that calls under way may still sample."""
        self._engine_failure: str | None = None
        self._overflow: str | None = None
        self._limit: str | None = None
        self._misuse: str | None = None

    def submit(self, answer: Callable[[int], Awaitable[Reply]]) -> asyncio.Task[Reply]:
        """Start a call, which is given its number. Cancelling the task drops it."""
        task = asyncio.create_task(self._admitted(answer))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        return task

    def count(self, what: str, amount: int = 1) -> None:
        """Add to the session's statistics."""
        self._counts[what] += amount

    def note_answer(self, num_sampled: int) -> None:
        """A call was answered with so many tokens."""
        self._num_sampled += num_sampled
        self.num_answered += 1
        self._overflow = self._engine_failure = None

    def note_misuse(self, refused: RefusedError) -> None:
        """The agent asked for something that no session serves."""
        if self._misuse is None:
            log.warning("session %s: %s", self._label, refused.message)
        self._misuse = refused.message

    def max_new_tokens(self, number: int, *limits: int | None) -> int | None:
        """How many tokens this call may sample at most; as many are kept from the session's calls at the same time."""
        known = [limit for limit in limits if limit is not None]
        most = self._limits.max_sampled_tokens
        if most is not None:
            left = most - self._num_sampled - sum(self._granted.values())
            if left < 1:
                raise self._refuse("sampled_tokens", most)
            known.append(left)
        if not known:
            return None
        self._granted[number] = max(1, min(known))
        return self._granted[number]

    def check_stored(self, num_bytes: int) -> None:
        """Refuse a call when the record is full."""
        if num_bytes > self._limits.max_stored_bytes:
            raise self._refuse("stored_bytes", self._limits.max_stored_bytes)

    async def aside[T](self, work: Callable[[], Awaitable[T]]) -> T:
        """Something that is no call, such as counting tokens: not numbered, but under the same limits."""
        self._check_limits()
        async with self._turns:
            return await work()

    @contextmanager
    def engine_at_work(self) -> Generator[None]:
        """Whatever an engine raises is its failure, and the agent must get an answer."""
        try:
            yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise self.engine_failed("the engine dropped a call that nobody cancelled") from error
            self.count("aborted")
            raise
        except RefusedError:
            raise
        except Exception as error:
            raise self.engine_failed(f"{type(error).__name__}: {error}") from error

    def engine_failed(self, what: str) -> RefusedError:
        self._engine_failure = what
        log.warning("the engine failed in session %s: %s", self._label, what)
        return RefusedError(502, "engine_failure", "the engine failed")

    def overflown(self, message: str) -> RefusedError:
        """A prompt that does not fit the context."""
        self._overflow = message
        if not self.num_answered:
            log.warning("session %s: the agent's first prompt needs more context. %s", self._label, message)
        return RefusedError(400, OVERFLOW, message)

    def close(
        self,
        stats: dict[str, int],
        *,
        segments: tuple[Segment, ...] = (),
        untrusted: tuple[Segment, ...] = (),
        exchanges: tuple[Exchange, ...] = (),
    ) -> Recording:
        """Refuse calls from now on, drop those under way, and hand out the record."""
        self.closed = True
        for task in self._in_flight:
            task.cancel()
        return Recording(
            segments=segments,
            untrusted=untrusted,
            exchanges=exchanges,
            stats=stats | self._counts | {"calls": self._num_calls, "answered": self.num_answered},
            calls=self._num_calls,
            answered=self.num_answered,
            engine_failure=self._engine_failure,
            engine_down_s=self._down_s() - self._down_before_s,
            overflow=self._overflow,
            limit=self._limit,
            misuse=self._misuse,
        )

    async def _admitted(self, answer: Callable[[int], Awaitable[Reply]]) -> Reply:
        number = self._admit()
        try:
            async with asyncio.timeout(self._seconds_left()), self._turns:
                return await answer(number)
        except TimeoutError as error:
            raise self._refuse("seconds", self._limits.max_seconds) from error
        finally:
            self._granted.pop(number, None)

    def _admit(self) -> int:
        """Number this call, from 0."""
        self._check_limits()
        self._num_calls += 1
        return self._num_calls - 1

    def _check_limits(self) -> None:
        if self.closed:
            raise unknown_key()
        limits = self._limits
        if limits.max_calls is not None and self._num_calls >= limits.max_calls:
            raise self._refuse("calls", limits.max_calls)
        if limits.max_sampled_tokens is not None and self._num_sampled >= limits.max_sampled_tokens:
            raise self._refuse("sampled_tokens", limits.max_sampled_tokens)
        if self._seconds_left() == 0:
            raise self._refuse("seconds", limits.max_seconds)
        if len(self._in_flight) > limits.max_concurrency + limits.max_waiting:
            raise self._refuse("waiting", limits.max_waiting)

    def _seconds_left(self) -> float | None:
        if self._limits.max_seconds is None:
            return None
        return max(0.0, self._started + self._limits.max_seconds - time.monotonic())

    def _refuse(self, what: str, limit: float | None) -> RefusedError:
        self.count("refused")
        self._limit = f"this session may have {limit} {what.replace('_', ' ')}"
        # Not 429: clients would try again, and codex dies of it.
        return RefusedError(403, f"{what}_limit_reached", self._limit)
