"""The phases of a rollout, and how many rollouts may be in each at once."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from dockyard.config import RolloutConfig


class Phase(StrEnum):
    """What a rollout is at."""

    BUILDING = "building"
    """Its environment starts, its agent is installed."""
    RUNNING = "running"
    """Its agent works."""
    VERIFYING = "verifying"
    """It is graded, and its environment taken down."""


type OnChange = Callable[[Mapping[Phase, int]], None]


def _nobody(_: Mapping[Phase, int]) -> None: ...


class Phases:
    """The slots of each phase, shared by all rollouts of a run."""

    def __init__(self, config: RolloutConfig, on_change: OnChange = _nobody) -> None:
        limits = {
            Phase.BUILDING: config.max_building,
            Phase.RUNNING: config.max_running,
            Phase.VERIFYING: config.max_verifying,
        }
        self._slots = {phase: asyncio.Semaphore(limit or config.concurrency) for phase, limit in limits.items()}
        self._counts: Counter[Phase] = Counter()
        self._on_change = on_change

    @contextmanager
    def passage(self) -> Generator["Passage"]:
        """One rollout's way through. Its slot is free again however the block ends."""
        passage = Passage(self)
        try:
            yield passage
        finally:
            passage.leave()

    async def take(self, phase: Phase) -> None:
        await self._slots[phase].acquire()
        self._count(phase, 1)

    def give_back(self, phase: Phase) -> None:
        self._slots[phase].release()
        self._count(phase, -1)

    def _count(self, phase: Phase, amount: int) -> None:
        self._counts[phase] += amount
        self._on_change(self._counts)


@dataclass(slots=True)
class Passage:
    """Holds at most one slot: that of the phase the rollout is in."""

    phases: Phases
    phase: Phase | None = None
    """The last one it was in."""
    waited_s: float = 0.0
    _holds: Phase | None = field(default=None)

    async def enter(self, phase: Phase) -> float:
        """Give the present slot back and wait for the next; returns for how long."""
        self.leave()
        started = time.monotonic()
        await self.phases.take(phase)
        self._holds = self.phase = phase
        waited = time.monotonic() - started
        self.waited_s += waited
        return waited

    def leave(self) -> None:
        if self._holds is not None:
            self.phases.give_back(self._holds)
            self._holds = None
