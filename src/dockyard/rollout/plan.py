"""The rollouts to make: `RolloutPlan`, its `Attempt`s, and the phases of each. Imports no Harbor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Self

from dockyard.types import Rollout, Task


class Phase(StrEnum):
    """What a rollout is doing."""

    BUILDING = "building"
    """Its environment starts, and its agent is installed."""
    RUNNING = "running"
    """Its agent works."""
    VERIFYING = "verifying"
    """It is graded, and its environment is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Identifies a rollout among those of its task."""

    task: str
    kind: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A rollout to make."""

    name: str
    """Unique in the run."""
    task: Task
    group: int
    index: int
    """Which of the group's rollouts."""
    seed: int
    temperature: float

    @property
    def place(self) -> Place:
        return Place(task=self.task.name, kind=self.task.kind, attempt=self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """The rollouts of one phase of a run: `group_size` of each task."""

    phase: str
    tasks: Sequence[Task]
    group_size: int
    temperature: float
    seed: int
    stream: str
    """The name of the random streams: phases that share it draw the same numbers."""
    retry_lost: bool = False
    """Make rollouts again that an earlier run recorded as lost. Training does not: its updates are replayed."""
    spare: Sequence[Task] = ()
    """The tasks that `further` continues with, in this order."""
    first_group: int = 0
    """The number of the phase's groups before this plan."""
    shape: Callable[[Attempt, Rollout], Rollout] | None = None
    """Adds the shaped reward to a rollout that has a reward, before it is recorded."""

    def further(self, count: int) -> Self:
        """The next `count` spare tasks, as further groups of the same phase."""
        spare, first = self.spare, self.first_group + len(self.tasks)
        return replace(self, tasks=spare[:count], spare=spare[count:], first_group=first)

    def attempts(self) -> list[Attempt]:
        return [
            Attempt(
                name=f"{self.phase}-{group:03}-{index:02}",
                task=task,
                group=group,
                index=index,
                seed=rollout_seed(self.seed, self.stream, group, index),
                temperature=self.temperature,
            )
            for group, task in enumerate(self.tasks, self.first_group)
            for index in range(self.group_size)
        ]


def rollout_seed(run_seed: int, stream: str, group: int, index: int) -> int:
    """The seed of one rollout's random stream."""
    digest = blake2b(f"{run_seed}/{stream}/{group}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
