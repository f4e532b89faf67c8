"""Evaluations on held-out tasks before training, every `eval.every` steps, and after it. The best adapter is kept."""

import asyncio
import logging
import time
from dataclasses import dataclass

from dockyard.callbacks import RunCallbacks
from dockyard.collect.passk import Score, score_numbers, score_rollouts
from dockyard.config import RunConfig
from dockyard.rollout.plan import RolloutPlan
from dockyard.run_dir.run import EVAL_AFTER, EVAL_BEFORE, HeldoutScore, RunDir, eval_phase
from dockyard.trainer.loop import Learner, TaskRollouts
from dockyard.types import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heldout:
    """Evaluations with the same tasks, agent and seeds each time, so that only the weights differ."""

    tasks: list[Task]
    attempts: TaskRollouts | None
    learner: Learner
    run: RunDir
    config: RunConfig
    callbacks: RunCallbacks

    async def before(self) -> None:
        """Evaluate the base model."""
        await self._score(EVAL_BEFORE, "before training", version=0)
        self.callbacks.report_evaluations()
        if self.tasks and self.attempts and self.learner.engine is None:
            logger.warning("trained weights are not evaluated: `%s` does not get them", self.config.engine.url)

    async def during(self, version: int) -> dict[str, float]:
        """Evaluate this version if that is due, and return its metrics. `after` evaluates the last version.

        Callbacks are called later, when the step is recorded.
        """
        every = self.config.eval.every
        if not every or version % every or version >= self.config.steps or self.learner.engine is None:
            return {}
        start = time.monotonic()
        found = await self._score(eval_phase(version), f"after step {version}", version=version)
        if found is None:
            return {}
        await self._keep_best(version, found)
        seconds = time.monotonic() - start
        return {
            "reward/heldout": found.mean,
            "reward/heldout_low": found.low,
            "reward/heldout_high": found.high,
            "time/eval_s": seconds,
        }

    async def after(self) -> None:
        """Evaluate the last version."""
        if self.learner.engine is None:
            return
        version = self.learner.version
        found = await self._score(EVAL_AFTER, "after training", version=version)
        if found:
            await self._keep_best(version, found)
        self.callbacks.report_evaluations()

    async def _score(self, phase: str, title: str, *, version: int) -> Score | None:
        if not self.tasks or self.attempts is None:
            return None
        plan = RolloutPlan(
            phase=phase,
            tasks=self.tasks,
            group_size=self.config.eval.samples,
            temperature=self.config.sampling.eval_temperature,
            seed=self.config.seed,
            stream="eval",
        )
        groups = await self.attempts.gather(plan, f"held-out tasks {title}")
        scores = score_rollouts(rollout for group in groups for rollout in group.rollouts)
        if scores is None:
            return None
        self.callbacks.evaluated(phase, version, score_numbers(scores))
        return scores.reward

    async def _keep_best(self, version: int, found: Score) -> None:
        if self.config.trainer.keep_best:
            reached = HeldoutScore(step=version, reward=found.mean)
            await asyncio.to_thread(self.run.checkpoints.keep_best, self.run.paths.adapter(version), reached)
