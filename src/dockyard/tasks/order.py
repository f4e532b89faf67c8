"""Which tasks, or recorded groups, each step attempts: an order that the seed determines, or the user's own.

`tasks.order` names a function with the signature of `choose_tasks`. It sees the rewards of finished steps as the run
folder records them, so its state is the run folder, and a resumed run chooses the same tasks.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import cast

from dockyard.config import RunConfig
from dockyard.errors import UsageError
from dockyard.extension import failed_call, load_function
from dockyard.run_dir.run import RunDir, step_phase
from dockyard.types import Task


def num_steps(num_items: int, count: int, passes: int) -> int:
    """Return the number of steps of this many passes. No step crosses the end of a pass."""
    return passes * ceil(num_items / count)


def with_steps(config: RunConfig, num_items: int) -> RunConfig:
    """Set `steps` from the number of passes, if the settings count passes."""
    if not config.counts_passes:
        return config
    steps = num_steps(num_items, config.grpo.tasks_per_step, config.tasks.passes or 1)
    return config.model_copy(update={"steps": steps})


def due[T](
    items: Sequence[T], step: int, count: int, seed: int, *, kind_of: Callable[[T], str], by_pass: bool = False
) -> list[T]:
    """Return the items of a step. Each occurs once per pass, in an order set by the seed, with alternating kinds.

    With `by_pass` the last step of a pass takes the remaining items, instead of continuing with the next pass.
    """
    if by_pass:
        epoch, place = divmod(step, num_steps(len(items), count, 1))
        return _shuffled(items, seed, epoch, kind_of)[place * count : (place + 1) * count]
    places = [divmod(position, len(items)) for position in range(step * count, (step + 1) * count)]
    return [_shuffled(items, seed, epoch, kind_of)[index] for epoch, index in places]


def spare[T](
    items: Sequence[T], step: int, count: int, seed: int, *, kind_of: Callable[[T], str], taken: Sequence[T]
) -> list[T]:
    """Return replacements for groups without a training signal, first those that the step has not `taken`."""
    drawn: list[T] = []
    for epoch in range(ceil(count / len(items))):
        drawn += sorted(_shuffled(items, f"{seed}-spare-{step}", epoch, kind_of), key=lambda item: item in taken)
    return drawn[:count]


def _shuffled[T](items: Sequence[T], seed: int | str, epoch: int, kind_of: Callable[[T], str]) -> list[T]:
    rng = random.Random(f"{seed}-{epoch}")
    by_kind: dict[str, list[T]] = {}
    for item in items:
        by_kind.setdefault(kind_of(item), []).append(item)
    for members in by_kind.values():
        rng.shuffle(members)
    rounds = max(len(members) for members in by_kind.values())
    return [members[turn] for turn in range(rounds) for members in by_kind.values() if turn < len(members)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """A task that a finished step attempted, with the rewards of its rollouts."""

    step: int
    task: str
    """The name of the task."""
    rewards: tuple[float | None, ...]
    """One for each rollout of the group. None: the rollout was lost to an infrastructure failure."""


type OrderFunction = Callable[[Sequence[Task], Sequence[Attempted], int, random.Random], Sequence[Task]]


def choose_tasks(tasks: Sequence[Task], history: Sequence[Attempted], count: int, rng: random.Random) -> Sequence[Task]:
    """Return the `count` tasks of the next step. `tasks.order` names a function with this signature.

    `history` has the attempts of earlier steps, oldest first. With `rollout.max_staleness` the last steps are missing,
    because they need not be finished when the rollouts of this step start. `rng` depends on the run's seed and the
    step. The result must depend on the arguments only. A task may occur more than once.
    """
    raise NotImplementedError


def load_order(reference: str) -> OrderFunction:
    """Load the function that `tasks.order` names."""
    return load_function(reference, "tasks.order", choose_tasks)


@dataclass(slots=True, kw_only=True)
class CustomOrder:
    """Chooses the tasks of each step by the function that `tasks.order` names."""

    reference: str
    tasks: Sequence[Task]
    run: RunDir
    _function: OrderFunction = field(init=False)
    _history: list[Attempted] = field(default_factory=list[Attempted])
    _num_read: int = 0
    """Number of steps in `_history`."""

    def __post_init__(self) -> None:
        self._function = load_order(self.reference)

    def due(self, step: int) -> list[Task]:
        """Return the tasks of a step.

        The rollouts of a step may start when `max_staleness` steps before it are unfinished. The history leaves those
        out even if they are finished by now, so that it does not depend on timing.
        """
        config = self.run.config
        history = self._attempts_before(step - config.rollout.max_staleness)
        rng = random.Random(f"{config.seed}-order-{step}")
        try:
            chosen = self._function(tuple(self.tasks), history, config.grpo.tasks_per_step, rng)
        except Exception as error:  # user-defined code
            raise failed_call(error, self.reference, "tasks.order", f"step {step}") from error
        return self._checked(chosen, step, config.grpo.tasks_per_step)

    def _attempts_before(self, step: int) -> tuple[Attempted, ...]:
        while self._num_read < step:
            self._history += attempts_of(self.run, self._num_read)
            self._num_read += 1
        return tuple(item for item in self._history if item.step < step)

    def _checked(self, chosen: object, step: int, count: int) -> list[Task]:
        known = set(self.tasks)
        returned = f"`tasks.order` is `{self.reference}`, which returned"
        if not isinstance(chosen, list | tuple):
            hint = "return a list of tasks"
            raise UsageError(f"{returned} {type(chosen).__name__} for step {step}, not a list", hint=hint)
        items = cast(Sequence[object], chosen)
        tasks = [item for item in items if isinstance(item, Task) and item in known]
        if len(tasks) < len(items):
            other = next(item for item in items if not isinstance(item, Task) or item not in known)
            message = f"{returned} `{other}` for step {step}, which is not one of the tasks that it was given"
            raise UsageError(message, hint="return items of its argument `tasks`, not their names")
        if len(tasks) != count:
            message = f"{returned} {len(tasks)} tasks for step {step}; it must return {count}"
            raise UsageError(message, hint="`count` is `grpo.tasks_per_step`; a task may occur more than once")
        return tasks


def attempts_of(run: RunDir, step: int) -> list[Attempted]:
    """Return the recorded attempts of a finished step, in the order of its groups."""
    groups: dict[int, list[tuple[int, str, float | None]]] = {}
    for item in run.read_rollouts(step_phase(step)):
        rollout = item.rollout
        groups.setdefault(item.group, []).append((rollout.attempt, rollout.task, rollout.reward))
    found = [sorted(groups[group], key=lambda member: member[0]) for group in sorted(groups)]
    return [
        Attempted(step=step, task=members[0][1], rewards=tuple(reward for _, _, reward in members)) for members in found
    ]
