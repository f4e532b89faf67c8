"""Record the steps of a run: metrics, trackers, the progress display, a checkpoint when one is due, and callbacks."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dockyard.callbacks import RunCallbacks
from dockyard.config import RunConfig
from dockyard.errors import DockyardError
from dockyard.rl.statistics import rollout_metrics
from dockyard.rollout.blame import failure_counts
from dockyard.run_dir.run import RunDir
from dockyard.trainer.display import TrainingProgress
from dockyard.trainer.dynamic_sampling import group_metrics
from dockyard.trainer.loop import Learner
from dockyard.types import Group, Rollout


@dataclass(slots=True)
class StepRecord:
    """Writes a step's metrics to the run folder, the display and the trackers, saves a checkpoint, calls callbacks.

    The order matters: a checkpoint implies that the steps before it are recorded.
    """

    run: RunDir
    progress: TrainingProgress
    learner: Learner
    evaluate: Callable[[int], Awaitable[dict[str, float]]]
    """Returns the metrics of a held-out evaluation of this version, or no metrics if none is due."""
    track: Callable[[int, Mapping[str, float]], None]
    """Sends a step's metrics to trackers."""
    off_policy_source: str | None = None
    """Says where the rollouts come from if the policy did not sample them."""
    callbacks: RunCallbacks = field(default_factory=RunCallbacks)
    """Called last, when everything about the step is on disk."""
    _since: float = 0.0

    def __post_init__(self) -> None:
        self._since = time.monotonic()

    async def record(self, step: int, groups: tuple[Group, ...], metrics: dict[str, float]) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        numbers = self._numbers(step, groups, metrics) | await self.evaluate(step + 1)
        self._since = time.monotonic()  # an evaluation is not part of the next step
        self.run.record_metrics(step, numbers)
        self.track(step, numbers)
        self._show(step, numbers, rollouts)
        if numbers.get("train/skipped"):
            _stop_if_stuck(self.run)
        await self.learner.checkpoint()
        self.callbacks.after_step(step, numbers)

    def _numbers(self, step: int, groups: tuple[Group, ...], metrics: dict[str, float]) -> dict[str, float]:
        seconds = time.monotonic() - self._since
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        of_groups = group_metrics(groups, self.run.config.grpo)
        numbers = rollout_metrics(rollouts) | of_groups | metrics | {"time/step_s": seconds}
        numbers["rollout/staleness"] = float(step) if self.off_policy_source else staleness(rollouts, step)
        numbers["rollout/tokens_per_s"] = numbers["rollout/sampled_tokens"] / max(seconds, 1e-9)
        return numbers

    def _show(self, step: int, numbers: dict[str, float], rollouts: list[Rollout]) -> None:
        self.progress.step(step, numbers, failure_counts(rollouts))
        if self.off_policy_source and "train/mean_logprob" in numbers:
            self.progress.say(
                f"step {step + 1}: off-policy by {step} updates: {self.off_policy_source}; "
                f"mean logprob of their tokens under the policy {numbers['train/mean_logprob']:.2f}"
            )


def is_saved(config: RunConfig, version: int) -> bool:
    """Whether a run saves a checkpoint of this version."""
    return version % config.trainer.save_every == 0 or version == config.steps


def _stop_if_stuck(run: RunDir) -> None:
    """Raise an error if the last `trainer.max_skipped_steps` updates in a row were skipped."""
    skipped = [line["train/skipped"] for line in run.read_metrics() if "train/skipped" in line]
    limit = run.config.trainer.max_skipped_steps
    if len(skipped) >= limit and all(skipped[-limit:]):
        raise DockyardError(
            f"the gradients of the last {limit} updates were not finite: the policy is not learning",
            hint="start another run with a lower `--trainer.lr` or `--model.dtype float32`; "
            "`--trainer.max_skipped_steps` sets how many may be skipped",
        )


def staleness(rollouts: list[Rollout], version: int) -> float:
    """The mean age of the sampled tokens, in updates between the weights that sampled them and `version`."""
    segments = [segment for rollout in rollouts for segment in rollout.segments if segment.versions is not None]
    ages = [version - segment.versions[segment.sampled] for segment in segments if segment.versions is not None]
    return float(np.concatenate(ages).mean()) if ages and sum(map(len, ages)) else 0.0
