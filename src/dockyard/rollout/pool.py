"""Make many rollouts concurrently, record each when it is finished, and skip those that are already recorded."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from dockyard.config import RolloutConfig
from dockyard.errors import DockyardError
from dockyard.rollout.blame import is_worth_retrying
from dockyard.rollout.plan import Attempt, RolloutPlan
from dockyard.run_dir.run import RunDir
from dockyard.types import Group, Rollout

logger = logging.getLogger(__name__)

_FIRST_WAIT_S = 1.0  # before an infrastructure failure is retried; doubled each time


class Runner(Protocol):
    """Makes one rollout."""

    async def run(self, attempt: Attempt) -> Rollout: ...


class Watch(Protocol):
    """Is called with each finished rollout and its place in the run. `made` is False if it was read from disk."""

    def __call__(self, plan: RolloutPlan, attempt: Attempt, rollout: Rollout, /, *, made: bool) -> None: ...


@dataclass(slots=True, kw_only=True)
class RolloutPool:
    """Makes rollouts with limited concurrency, retries infrastructure failures, and records everything.

    Concurrent plans share the slots; the earlier plan goes first.
    """

    runner: Runner
    run: RunDir
    config: RolloutConfig
    transcribe: Callable[[Rollout], str]
    """Returns the rollout as readable text."""
    watch: Watch | None = None
    """Called for each rollout of a plan, in the thread of the event loop."""
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.config.concurrency)

    async def collect(self, plan: RolloutPlan, on_finish: Callable[[Rollout], None]) -> tuple[Group, ...]:
        """Return the groups of this phase in the order of its tasks. Recorded rollouts are read from disk."""
        done = self._recorded(plan)
        loop = asyncio.get_running_loop()

        async def make(attempt: Attempt) -> None:
            rollout = await self.make(attempt)
            if rollout.reward is not None:
                # Shielded: a run that is stopped now still records finished rollouts.
                recording = loop.run_in_executor(None, self._finish, plan, attempt, rollout)
                rollout = await asyncio.shield(recording)
            done[attempt.group, attempt.index] = rollout
            on_finish(rollout)
            if self.watch:
                self.watch(plan, attempt, rollout, made=True)

        try:
            async with asyncio.TaskGroup() as making:
                for attempt in plan.attempts():
                    if (attempt.group, attempt.index) in done:
                        on_finish(done[attempt.group, attempt.index])
                        if self.watch:
                            self.watch(plan, attempt, done[attempt.group, attempt.index], made=False)
                    else:
                        making.create_task(make(attempt))
        except* DockyardError as errors:
            raise errors.exceptions[0] from None
        rollouts = [done[attempt.group, attempt.index] for attempt in plan.attempts()]
        if plan.first_group == 0:  # further groups may be too few for a meaningful share
            self._check_losses(plan.phase, rollouts)
        for attempt, rollout in zip(plan.attempts(), rollouts, strict=True):
            if rollout.reward is None:  # only now: a run that stops before this retries them when it is resumed
                self._record(plan.phase, attempt.group, rollout)
        return tuple(
            Group(
                task=task.name,
                rollouts=tuple(rollouts[index * plan.group_size :][: plan.group_size]),
                spare=plan.first_group > 0,
            )
            for index, task in enumerate(plan.tasks)
        )

    async def make(self, attempt: Attempt) -> Rollout:
        """Make one rollout as soon as there is a slot for it, without recording it."""
        async with self._slots:
            return await self._persist(attempt)

    def _recorded(self, plan: RolloutPlan) -> dict[tuple[int, int], Rollout]:
        names = [task.name for task in (*plan.tasks, *plan.spare)]
        done: dict[tuple[int, int], Rollout] = {}
        for item in self.run.read_rollouts(plan.phase):
            place = item.group - plan.first_group
            if place < 0:
                continue
            if place >= len(names) or item.rollout.task != names[place]:
                raise DockyardError(
                    f"the run recorded `{item.rollout.task}` in {plan.phase}, where it would now attempt other tasks",
                    hint="restore the tasks, or start another run",
                )
            if item.rollout.reward is not None or not plan.retry_lost:
                done[item.group, item.rollout.attempt] = item.rollout
        return done

    async def _persist(self, attempt: Attempt) -> Rollout:
        """Retry as long as the infrastructure is to blame and retries are left."""
        wait_s = _FIRST_WAIT_S
        for _ in range(self.config.retries):
            rollout = await self.runner.run(attempt)
            if rollout.failure is None or not is_worth_retrying(rollout.failure):
                return rollout
            logger.warning("%s: %s, retrying", attempt.name, rollout.failure.message)
            await asyncio.sleep(wait_s)
            wait_s *= 2
        return await self.runner.run(attempt)

    def _finish(self, plan: RolloutPlan, attempt: Attempt, rollout: Rollout) -> Rollout:
        """Shape the reward if the plan says so, and record the rollout."""
        finished = plan.shape(attempt, rollout) if plan.shape else rollout
        self._record(plan.phase, attempt.group, finished)
        return finished

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
