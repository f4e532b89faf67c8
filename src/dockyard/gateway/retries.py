"""Bringing answers to agents that hang up and ask again.

A client that lost its connection sends the same bytes once more. It gets the answer that was being sampled for it, or
that never reached it, instead of a second one that the first would only compete with.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from dockyard.gateway.protocol import Reply

_REMEMBERED = 32


@dataclass(slots=True, eq=False)
class Flight:
    """One sampled answer on its way to whoever asks for it."""

    task: asyncio.Task[Reply]
    num_waiting: int = 0
    delivered: bool = False

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class Deliveries:
    """A session's recent answers by the bytes that asked for them."""

    def __init__(self, mark_delivered: Callable[[Reply, bool], None], grace_s: float) -> None:
        self._mark_delivered = mark_delivered
        self._grace_s = grace_s
        self._flights: OrderedDict[bytes, Flight] = OrderedDict()

    def find(self, digest: bytes, *, is_retry: bool) -> Flight | None:
        """The flight that a request with these bytes is about; None if it wants a new answer.

        Agents also repeat a request on purpose, to have it sampled anew: then the first answer has arrived.
        """
        flight = self._flights.get(digest)
        if flight is None or flight.failed:
            return None
        lost = not flight.delivered and flight.num_waiting == 0
        return flight if lost or is_retry else None

    def start(self, digest: bytes, task: asyncio.Task[Reply]) -> Flight:
        self._flights[digest] = flight = Flight(task)
        self._flights.move_to_end(digest)
        while len(self._flights) > _REMEMBERED:
            self._flights.popitem(last=False)
        return flight

    @contextmanager
    def bringing(self, flight: Flight) -> Generator[None, None, None]:
        """Around waiting for an answer and sending it. One that nobody waits for any more is dropped a little later."""
        flight.num_waiting += 1
        try:
            yield
        except (asyncio.CancelledError, ConnectionError):
            flight.num_waiting -= 1
            self._hung_up(flight)
            raise
        except BaseException:
            flight.num_waiting -= 1
            raise
        else:
            flight.num_waiting -= 1
            self._arrived(flight)

    def settle(self) -> None:
        """The session ends: an answer that nobody waits for any more did not arrive."""
        for flight in self._flights.values():
            if flight.num_waiting == 0 and flight.task.done():
                self._note_loss(flight)

    def _hung_up(self, flight: Flight) -> None:
        if flight.task.done():
            self._note_loss(flight)
        elif flight.num_waiting == 0:
            asyncio.get_running_loop().call_later(self._grace_s, self._abandon, flight)

    def _abandon(self, flight: Flight) -> None:
        if flight.num_waiting == 0 and not flight.task.cancel():
            self._note_loss(flight)

    def _note_loss(self, flight: Flight) -> None:
        if not flight.failed and not flight.delivered:
            self._mark_delivered(flight.task.result(), False)

    def _arrived(self, flight: Flight) -> None:
        if not flight.failed and not flight.delivered:
            flight.delivered = True
            self._mark_delivered(flight.task.result(), True)
