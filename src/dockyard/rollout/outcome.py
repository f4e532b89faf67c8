"""What Harbor says of a trial, and what becomes of it together with what the gateway recorded."""

# pyright: reportMissingTypeStubs=false

import math
from dataclasses import dataclass, field
from datetime import datetime

from harbor import TrialResult
from harbor.models.verifier.result import VerifierResult

from dockyard.gateway.accounting import Recording
from dockyard.rollout.blame import failure_of
from dockyard.rollout.order import Place
from dockyard.types import Blame, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a trial ended."""

    reward: float | None = None
    exception: str = ""
    """The type's name; empty when nothing was raised."""
    message: str = ""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """By phase."""


def outcome_of(result: TrialResult) -> Outcome:
    """The part of a result that counts here."""
    reward = _reward(result)
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
        reward=reward,
        exception=raised.exception_type if raised else "",
        message=raised.exception_message if raised else "",
        seconds=seconds | {"total": _seconds(result.started_at, result.finished_at)},
    )


def _reward(result: TrialResult) -> float | None:
    """Of several steps, one that could not be graded counts as 0, where Harbor's mean leaves it out."""
    reward = _number(result.verifier_result)
    graded = [number for step in result.step_results or [] if (number := _number(step.verifier_result)) is not None]
    if reward is None or not graded or len(graded) == len(result.step_results or []):
        return reward
    is_mean = math.isclose(reward, sum(graded) / len(graded))
    return sum(graded) / len(result.step_results or []) if is_mean else reward


def _number(graded: VerifierResult | None) -> float | None:
    rewards = (graded.rewards if graded else None) or {}
    reward = rewards.get("reward", next(iter(rewards.values()), None))
    return None if reward is None else float(reward)


def _seconds(start: datetime | None, end: datetime | None) -> float:
    return (end - start).total_seconds() if start and end else 0.0


def rollout_of(place: Place, outcome: Outcome, recording: Recording, *, must_ask: bool = False) -> Rollout:
    """A rollout with its reward, unless the infrastructure is to blame for how it ended."""
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
