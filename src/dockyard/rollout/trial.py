"""One Harbor Trial becomes one Rollout. The only file that runs trials."""

# pyright: reportMissingTypeStubs=false

import asyncio
import math
import shutil
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from harbor import Trial, TrialConfig, TrialResult, TrialTaskConfig

from dockyard.config import AgentConfig, EnvironmentConfig, GatewayConfig, RolloutConfig
from dockyard.gateway.app import Gateway
from dockyard.gateway.ledger import Limits, Recording
from dockyard.gateway.text_mode import exchange_json
from dockyard.rollout.agents import Endpoint, agent_config, environment_config, verifier_config
from dockyard.rollout.blame import failure_of
from dockyard.types import Blame, Rollout, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A rollout that is to be made."""

    name: str
    """Unique in the run."""
    task: Task
    group: int
    index: int
    """Which of the group's rollouts."""
    seed: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunner:
    """What all rollouts of a run have in common."""

    gateway: Gateway
    agent: AgentConfig
    environment: EnvironmentConfig
    limits: RolloutConfig
    max_new_tokens: int
    trials_dir: Path
    policy_use: GatewayConfig = field(default_factory=GatewayConfig)

    async def run(self, attempt: Attempt) -> Rollout:
        """Make the attempt. Whatever breaks it is a failure on the rollout; only cancellation is raised."""
        session = self.gateway.open_session(
            attempt.name,
            seed=attempt.seed,
            temperature=attempt.temperature,
            max_new_tokens=self.max_new_tokens,
            limits=self._model_limits(),
        )
        try:
            outcome = await self._outcome(attempt, Endpoint(url=self.gateway.url, key=session.key))
        finally:
            recording = self.gateway.close_session(session)
        return _rollout(attempt, outcome, recording)

    async def _outcome(self, attempt: Attempt, endpoint: Endpoint) -> "_Outcome":
        shutil.rmtree(self.trials_dir / attempt.name, ignore_errors=True)  # of an earlier try
        config = TrialConfig(
            task=TrialTaskConfig(path=attempt.task.path),
            trial_name=attempt.name,
            trials_dir=self.trials_dir,
            agent=agent_config(self.agent, endpoint, self._agent_timeout_s(attempt.task)),
            environment=environment_config(self.environment),
            verifier=verifier_config(self.environment),
        )
        try:
            async with asyncio.timeout(self.limits.total_timeout_s):
                return _read(await (await Trial.create(config)).run())
        except TimeoutError:
            message = f"not done after {self.limits.total_timeout_s:g} s (`rollout.total_timeout_s`)"
            return _Outcome(exception="RolloutTimeoutError", message=message)
        except Exception as error:  # a bad trial is data, whatever Harbor and the environment raise
            return _Outcome(exception=type(error).__name__, message=str(error))

    def _model_limits(self) -> Limits:
        return Limits(
            max_calls=self.policy_use.max_calls,
            max_sampled_tokens=self.policy_use.max_sampled_tokens,
            max_seconds=self.limits.total_timeout_s,
            max_concurrency=self.policy_use.max_concurrency,
        )

    def _agent_timeout_s(self, task: Task) -> float:
        # Harbor's own upper limit does not bind a task that has none.
        return min(self.limits.agent_timeout_s, task.agent_timeout_s or math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    reward: float | None = None
    exception: str = ""
    message: str = ""
    seconds: dict[str, float] | None = None


def _read(result: TrialResult) -> _Outcome:
    rewards = (result.verifier_result.rewards if result.verifier_result else None) or {}
    reward = rewards.get("reward", next(iter(rewards.values()), None))
    phases = {
        "environment": result.environment_setup,
        "agent": result.agent_execution,
        "verifier": result.verifier,
    }
    seconds = {name: _seconds(phase.started_at, phase.finished_at) for name, phase in phases.items() if phase}
    seconds["total"] = _seconds(result.started_at, result.finished_at)
    return _Outcome(
        reward=None if reward is None else float(reward),
        exception=result.exception_info.exception_type if result.exception_info else "",
        message=result.exception_info.exception_message if result.exception_info else "",
        seconds=seconds,
    )


def _seconds(start: datetime | None, end: datetime | None) -> float:
    return (end - start).total_seconds() if start and end else 0.0


def _rollout(attempt: Attempt, outcome: _Outcome, recording: Recording) -> Rollout:
    failure = failure_of(outcome.exception, outcome.message, recording)
    reward = outcome.reward if outcome.reward is not None and math.isfinite(outcome.reward) else 0.0
    if failure is not None and failure.blame is Blame.INFRASTRUCTURE:
        reward = None
    return Rollout(
        task=attempt.task.name,
        kind=attempt.task.kind,
        attempt=attempt.index,
        segments=recording.segments,
        reward=reward,
        failure=failure,
        seconds=outcome.seconds or {},
        stats=recording.stats,
        untrusted=recording.untrusted,
        exchanges=tuple(map(exchange_json, recording.exchanges)),
    )
