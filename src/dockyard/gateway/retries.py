"""Replies for clients that disconnect and send the same request again.

A retry with the same bytes gets the reply that is being sampled for the first attempt, or that did not reach the
client. Sampling a second reply would leave two competing continuations of one prompt.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from dockyard.gateway.protocol import ModelReply

_MAX_REMEMBERED = 32


@dataclass(slots=True, eq=False)
class PendingCall:
    """One sampled reply, and how many connections wait for it."""

    task: asyncio.Task[ModelReply]
    num_waiting: int = 0
    delivered: bool = False

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class RecentCalls:
    """The recent calls of a session, by a digest of the request."""

    def __init__(self, mark_delivered: Callable[[ModelReply, bool], None], grace_s: float) -> None:
        """`grace_s` is how long a call continues after its last connection is closed."""
        self._mark_delivered = mark_delivered
        self._grace_s = grace_s
        self._calls: OrderedDict[bytes, PendingCall] = OrderedDict()

    def find(self, digest: bytes, *, is_retry: bool) -> PendingCall | None:
        """The call that this request retries; None if the request is a new call.

        Agents also repeat a request on purpose, for another sample. Then the first reply was delivered.
        """
        call = self._calls.get(digest)
        if call is None or call.failed:
            return None
        lost = not call.delivered and call.num_waiting == 0
        return call if lost or is_retry else None

    def start(self, digest: bytes, task: asyncio.Task[ModelReply]) -> PendingCall:
        self._calls[digest] = call = PendingCall(task)
        self._calls.move_to_end(digest)
        while len(self._calls) > _MAX_REMEMBERED:
            self._calls.popitem(last=False)
        return call

    @contextmanager
    def delivering(self, call: PendingCall) -> Generator[None, None, None]:
        """Wrap waiting for a reply and sending it. A call that no connection waits for is cancelled after `grace_s`."""
        call.num_waiting += 1
        try:
            yield
        except (asyncio.CancelledError, ConnectionError):
            call.num_waiting -= 1
            self._disconnected(call)
            raise
        except BaseException:
            call.num_waiting -= 1
            raise
        call.num_waiting -= 1
        self._mark(call, delivered=True)

    def close(self) -> None:
        """Mark replies as undelivered that no connection waits for. Call it when the session ends."""
        for call in self._calls.values():
            if call.num_waiting == 0 and call.task.done():
                self._mark(call, delivered=False)

    def _disconnected(self, call: PendingCall) -> None:
        if call.task.done():
            self._mark(call, delivered=False)
        elif call.num_waiting == 0:
            asyncio.get_running_loop().call_later(self._grace_s, self._abandon, call)

    def _abandon(self, call: PendingCall) -> None:
        if call.num_waiting == 0 and not call.task.cancel():
            self._mark(call, delivered=False)

    def _mark(self, call: PendingCall, *, delivered: bool) -> None:
        if not call.failed and not call.delivered:
            call.delivered = delivered
            self._mark_delivered(call.task.result(), delivered)
