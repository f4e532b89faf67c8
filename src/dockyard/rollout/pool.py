"""Makes many rollouts at once, records each the moment it is finished, and makes none that is recorded already."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from dockyard.config import RolloutConfig
from dockyard.errors import DockyardError
from dockyard.rollout.blame import is_worth_retrying
from dockyard.rollout.order import Attempt, Order
from dockyard.run_dir.run import RunDir
from dockyard.types import Group, Rollout

logger = logging.getLogger(__name__)

_FIRST_WAIT_S = 1.0  # before an infrastructure failure is tried again; doubled each time


class Runner(Protocol):
    """Makes one rollout."""

    async def run(self, attempt: Attempt) -> Rollout: ...


class Watch(Protocol):
    """Is called with each finished rollout and its place in the run. `made` is False if it was read from disk."""

    def __call__(self, order: Order, attempt: Attempt, rollout: Rollout, /, *, made: bool) -> None: ...


@dataclass(slots=True, kw_only=True)
class RolloutPool:
    """Bounded concurrency, retries for infrastructure failures only, and a record of everything.

    Orders that are under way at the same time share the slots; the one that came first goes first.
    """

    runner: Runner
    run: RunDir
    config: RolloutConfig
    transcribe: Callable[[Rollout], str]
    """The rollout as text, for people."""
    watch: Watch | None = None
    """Called for each rollout of an order, in the thread of the event loop."""
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.config.concurrency)

    async def collect(self, order: Order, on_finish: Callable[[Rollout], None]) -> tuple[Group, ...]:
        """The groups of this phase, recorded ones first read from disk. In the same order however they finished."""
        done = self._recorded(order)
        loop = asyncio.get_running_loop()

        async def make(attempt: Attempt) -> None:
            rollout = await self.make(attempt)
            if rollout.reward is not None:
                # Shielded: a run that is stopped now still records what is finished.
                recording = loop.run_in_executor(None, self._record, order.phase, attempt.group, rollout)
                await asyncio.shield(recording)
            done[attempt.group, attempt.index] = rollout
            on_finish(rollout)
            if self.watch:
                self.watch(order, attempt, rollout, made=True)

        try:
            async with asyncio.TaskGroup() as making:
                for attempt in order.attempts():
                    if (attempt.group, attempt.index) in done:
                        on_finish(done[attempt.group, attempt.index])
                        if self.watch:
                            self.watch(order, attempt, done[attempt.group, attempt.index], made=False)
                    else:
                        making.create_task(make(attempt))
        except* DockyardError as errors:
            raise errors.exceptions[0] from None
        rollouts = [done[attempt.group, attempt.index] for attempt in order.attempts()]
        if order.first_group == 0:  # further groups may be too few to judge by
            self._check_losses(order.phase, rollouts)
        for attempt, rollout in zip(order.attempts(), rollouts, strict=True):
            if rollout.reward is None:  # only now: had the run stopped here, resuming it should try them again
                self._record(order.phase, attempt.group, rollout)
        return tuple(
            Group(
                task=task.name,
                rollouts=tuple(rollouts[index * order.group_size :][: order.group_size]),
                spare=order.first_group > 0,
            )
            for index, task in enumerate(order.tasks)
        )

    async def make(self, attempt: Attempt) -> Rollout:
        """One rollout, when there is a slot for it. It is not recorded."""
        async with self._slots:
            return await self._persist(attempt)

    def _recorded(self, order: Order) -> dict[tuple[int, int], Rollout]:
        names = [task.name for task in (*order.tasks, *order.spare)]
        done: dict[tuple[int, int], Rollout] = {}
        for item in self.run.read_rollouts(order.phase):
            place = item.group - order.first_group
            if place < 0:
                continue
            if place >= len(names) or item.rollout.task != names[place]:
                raise DockyardError(
                    f"the run recorded `{item.rollout.task}` in {order.phase}, where it would now attempt other tasks",
                    hint="put the tasks back as they were, or begin another run",
                )
            if item.rollout.reward is not None or not order.retry_lost:
                done[item.group, item.rollout.attempt] = item.rollout
        return done

    async def _persist(self, attempt: Attempt) -> Rollout:
        """Try again as long as the infrastructure is to blame and tries are left."""
        wait_s = _FIRST_WAIT_S
        for _ in range(self.config.retries):
            rollout = await self.runner.run(attempt)
            if rollout.failure is None or not is_worth_retrying(rollout.failure):
                return rollout
            logger.warning("%s: %s, trying again", attempt.name, rollout.failure.message)
            await asyncio.sleep(wait_s)
            wait_s *= 2
        return await self.runner.run(attempt)

    def _record(self, phase: str, group: int, rollout: Rollout) -> None:
        self.run.write_rollout(phase, rollout, group=group, transcript=self.transcribe(rollout))

    def _check_losses(self, phase: str, rollouts: list[Rollout]) -> None:
        lost = [rollout.failure for rollout in rollouts if rollout.reward is None and rollout.failure]
        if rollouts and len(lost) > self.config.max_lost_share * len(rollouts):
            causes = ", ".join(f"{cause} {count}x" for cause, count in Counter(item.cause for item in lost).items())
            raise DockyardError(
                f"{len(lost)} of {len(rollouts)} rollouts of {phase} were lost to infrastructure ({causes}); "
                f"the last: {lost[-1].message.splitlines()[0] if lost[-1].message else lost[-1].cause}",
                hint="`dockyard doctor` checks this machine; `--rollout.max_lost_share` sets how many may be lost",
            )
