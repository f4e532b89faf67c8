"""Per-session accounting: limits, counters, failures, and the record that a closed session returns."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from dockyard.gateway.protocol import OVERFLOW, ModelReply, RefusedError
from dockyard.types import Exchange, Segment

log = logging.getLogger(__name__)


def unknown_key() -> RefusedError:
    """The refusal of a missing, wrong or expired key. It is the same for all three, so that it reveals nothing."""
    return RefusedError(401, "invalid_api_key", "the API key is not valid")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What one session may use. The policy can read its agent's key, so the gateway enforces all of these itself."""

    max_calls: int | None = None
    max_sampled_tokens: int | None = None
    max_seconds: float | None = None
    """From the start of the session. It also ends calls in progress."""
    max_concurrency: int = 8
    """Calls sampled at the same time. Further calls wait."""
    max_waiting: int = 64
    max_stored_bytes: int = 256 * 2**20
    """Size of the messages in the session's record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The record of a closed session."""

    segments: tuple[Segment, ...] = ()
    untrusted: tuple[Segment, ...] = ()
    """Segments of calls that the agent's harness did not make. They are recorded, but not trained on."""
    exchanges: tuple[Exchange, ...] = ()
    """The calls of a text-mode session, which has no segments."""
    stats: dict[str, int]
    calls: int
    """Model calls that were started."""
    answered: int
    """Model calls that the policy answered."""
    engine_failure: str | None = None
    """The engine's last error, if no call was answered after it."""
    engine_down_s: float = 0.0
    """Seconds during the session in which the engine could not be reached."""
    overflow: str | None = None
    """The refusal of a prompt that did not fit the context, if no call was answered after it."""
    limit: str | None = None
    """The refusal of a call past a limit, if there was one."""
    misuse: str | None = None
    """The refusal of a call for a model that is not served, if there was one."""


class SessionAccounting:
    """Enforces the limits of one session and keeps its counters and failures."""

    def __init__(self, label: str, limits: SessionLimits, down_s: Callable[[], float] = lambda: 0.0) -> None:
        """`down_s` returns the total seconds that the engine has been out of reach."""
        self.closed = False
        self.num_answered = 0
        self._label = label
        self._limits = limits
        self._started = time.monotonic()
        self._down_s, self._down_before_s = down_s, down_s()
        self._concurrency = asyncio.Semaphore(limits.max_concurrency)
        self._in_flight: set[asyncio.Task[ModelReply]] = set()
        self._counts: Counter[str] = Counter()
        self._num_calls = 0
        self._num_sampled = 0
        self._reserved: dict[int, int] = {}
        """Tokens that each call in progress may still sample."""
        self._engine_failure: str | None = None
        self._overflow: str | None = None
        self._limit: str | None = None
        self._misuse: str | None = None

    def submit(self, answer: Callable[[int], Awaitable[ModelReply]]) -> asyncio.Task[ModelReply]:
        """Start a call; `answer` is passed the call's number, from 0. Cancelling the task drops the call."""
        task = asyncio.create_task(self._admitted(answer))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        return task

    def count(self, what: str, amount: int = 1) -> None:
        """Add to the session's statistics."""
        self._counts[what] += amount

    def note_answer(self, num_sampled: int) -> None:
        """Count an answered call, which sampled `num_sampled` tokens."""
        self._num_sampled += num_sampled
        self.num_answered += 1
        self._overflow = self._engine_failure = None

    def note_misuse(self, refused: RefusedError) -> None:
        """Record a call for something that is not served."""
        if self._misuse is None:
            log.warning("session %s: %s", self._label, refused.message)
        self._misuse = refused.message

    def max_new_tokens(self, number: int, *limits: int | None) -> int | None:
        """How many tokens this call may sample. They are reserved from the session's budget until the call ends."""
        known = [limit for limit in limits if limit is not None]
        most = self._limits.max_sampled_tokens
        if most is not None:
            left = most - self._num_sampled - sum(self._reserved.values())
            if left < 1:
                raise self._refuse("sampled_tokens", most)
            known.append(left)
        if not known:
            return None
        self._reserved[number] = max(1, min(known))
        return self._reserved[number]

    def check_stored(self, num_bytes: int) -> None:
        """Refuse the call if the session's record is full."""
        if num_bytes > self._limits.max_stored_bytes:
            raise self._refuse("stored_bytes", self._limits.max_stored_bytes)

    @asynccontextmanager
    async def uncounted(self) -> AsyncGenerator[None]:
        """Wrap work that is not a model call, such as counting tokens. The same limits apply."""
        self._check_limits()
        async with self._concurrency:
            yield

    @contextmanager
    def engine_errors(self) -> Generator[None]:
        """Record whatever the engine raises as its failure, and refuse the call with an answer for the agent."""
        try:
            yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise self.engine_failed("the engine dropped a call that was not cancelled") from error
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

    def context_overflow(self, message: str) -> RefusedError:
        """Record and refuse a prompt that does not fit the context."""
        self._overflow = message
        if not self.num_answered:
            log.warning("session %s: the agent's first prompt does not fit the context. %s", self._label, message)
        return RefusedError(400, OVERFLOW, message)

    def close(
        self,
        stats: dict[str, int],
        *,
        segments: tuple[Segment, ...] = (),
        untrusted: tuple[Segment, ...] = (),
        exchanges: tuple[Exchange, ...] = (),
    ) -> Recording:
        """Refuse further calls, cancel those in progress, and return the record."""
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

    async def _admitted(self, answer: Callable[[int], Awaitable[ModelReply]]) -> ModelReply:
        self._check_limits()
        number = self._num_calls
        self._num_calls += 1
        try:
            async with asyncio.timeout(self._seconds_left()), self._concurrency:
                return await answer(number)
        except TimeoutError as error:
            raise self._refuse("seconds", self._limits.max_seconds) from error
        finally:
            self._reserved.pop(number, None)

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
        unit = "waiting calls" if what == "waiting" else what.replace("_", " ")
        self._limit = f"this session is limited to {limit} {unit}"
        # Not 429: clients would retry, and codex exits on it.
        return RefusedError(403, f"{what}_limit_reached", self._limit)
