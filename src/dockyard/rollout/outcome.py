"""The outcome of a trial as Harbor reports it, and the rollout made of it and of the gateway's recording."""

# pyright: reportMissingTypeStubs=false

import math
from dataclasses import dataclass, field
from datetime import datetime

from harbor import TrialResult
from harbor.models.verifier.result import VerifierResult

from dockyard.gateway.accounting import Recording
from dockyard.rollout.blame import failure_of
from dockyard.rollout.plan import Place
from dockyard.types import Blame, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a trial ended."""

    reward: float | None = None
    exception: str = ""
    """The name of the exception's type; empty if none was raised."""
    message: str = ""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Duration of each phase."""


def outcome_of(result: TrialResult) -> Outcome:
    """Return the outcome of a finished trial."""
    phases = {
        "environment": result.environment_setup,
        "setup": result.agent_setup,
        "agent": result.agent_execution,
        "verifier": result.verifier,
    }
    seconds = {name: _seconds(phase.started_at, phase.finished_at) for name, phase in phases.items() if phase}
    failed = [step.exception_info for step in result.step_results or [] if step.exception_info]
    raised = result.exception_info or next(iter(failed), None)
    return Outcome(
        reward=_reward(result),
        exception=raised.exception_type if raised else "",
        message=raised.exception_message if raised else "",
        seconds=seconds | {"total": _seconds(result.started_at, result.finished_at)},
    )


def _reward(result: TrialResult) -> float | None:
    """Return the reward. A step that could not be graded counts as 0, where Harbor's mean omits it."""
    reward, steps = _number(result.verifier_result), result.step_results or []
    graded = [number for step in steps if (number := _number(step.verifier_result)) is not None]
    if reward is None or not graded or len(graded) == len(steps):
        return reward
    is_mean = math.isclose(reward, sum(graded) / len(graded))
    return sum(graded) / len(steps) if is_mean else reward


def _number(graded: VerifierResult | None) -> float | None:
    rewards = (graded.rewards if graded else None) or {}
    reward = rewards.get("reward", next(iter(rewards.values()), None))
    return None if reward is None else float(reward)


def _seconds(start: datetime | None, end: datetime | None) -> float:
    return (end - start).total_seconds() if start and end else 0.0


def rollout_of(place: Place, outcome: Outcome, recording: Recording, *, must_ask: bool = False) -> Rollout:
    """Return the rollout, with its reward unless the infrastructure is to blame for its failure."""
    failure = failure_of(outcome.exception, outcome.message, recording, must_ask=must_ask)
    reward = outcome.reward if outcome.reward is not None and math.isfinite(outcome.reward) else 0.0
    return Rollout(
        task=place.task,
        kind=place.kind,
        attempt=place.attempt,
        segments=recording.segments,
        reward=None if failure is not None and failure.blame is Blame.INFRASTRUCTURE else reward,
        failure=failure,
        seconds=outcome.seconds,
        stats=recording.stats,
        untrusted=recording.untrusted,
        exchanges=recording.exchanges,
    )
