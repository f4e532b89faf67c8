"""Run one Harbor Trial and turn it into one Rollout. Only this file runs trials.

A rollout passes through phases, and each phase has its own limit on concurrent rollouts.
"""

# pyright: reportMissingTypeStubs=false

import asyncio
import math
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from harbor import Trial, TrialConfig, TrialEvent, TrialHookEvent, TrialTaskConfig, TrialVerifierConfig

from dockyard.config import AgentConfig, GatewayConfig, RolloutConfig
from dockyard.gateway.accounting import Recording, SessionLimits
from dockyard.gateway.server import Gateway
from dockyard.gateway.sessions import Sampling, Session
from dockyard.rollout.agents.wiring import Endpoint, agent_config, must_ask
from dockyard.rollout.environments import Site
from dockyard.rollout.outcome import Outcome, outcome_of, rollout_of
from dockyard.rollout.plan import Attempt, Phase
from dockyard.rollout.verifier import VERIFIER
from dockyard.types import Rollout, Task

type OnChange = Callable[[Mapping[Phase, int]], None]


_SLACK_S = 60.0
"""For the time between the phases: copying files in and out, removing the environment."""
_TIMEOUT_IN = {
    Phase.BUILDING: "EnvironmentStartTimeoutError",
    Phase.RUNNING: "RolloutTimeoutError",
    Phase.VERIFYING: "VerifierTimeoutError",
}
"""The exception that stands for the time limit of the whole rollout, by the phase in which it was reached."""


class Phases:
    """The slots of each phase, shared by all rollouts of a run."""

    def __init__(self, config: RolloutConfig, on_change: OnChange = lambda _: None) -> None:
        limits = {
            Phase.BUILDING: config.max_building,
            Phase.RUNNING: config.max_running,
            Phase.VERIFYING: config.max_verifying,
        }
        self._slots = {phase: asyncio.Semaphore(limit or config.concurrency) for phase, limit in limits.items()}
        self._counts: Counter[Phase] = Counter()
        self._on_change = on_change

    @contextmanager
    def slot(self) -> Generator["PhaseSlot"]:
        """Provide the slot of one rollout. It is released however the block ends."""
        slot = PhaseSlot(self)
        try:
            yield slot
        finally:
            slot.leave()

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
class PhaseSlot:
    """Holds at most one slot: that of the phase that the rollout is in."""

    phases: Phases
    phase: Phase = Phase.BUILDING
    """The last phase that it was in."""
    waited_s: float = 0.0
    _is_held: bool = False

    async def enter(self, phase: Phase) -> float:
        """Release the current slot, wait for the next one, and return the time that took."""
        self.leave()
        started = time.monotonic()
        await self.phases.take(phase)
        self.phase, self._is_held = phase, True
        waited = time.monotonic() - started
        self.waited_s += waited
        return waited

    def leave(self) -> None:
        if self._is_held:
            self.phases.give_back(self.phase)
            self._is_held = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunner:
    """Runs the rollouts of a run. Holds the settings that they share."""

    gateway: Gateway
    agents_url: str
    """The gateway's root URL for this run's agents."""
    agent: AgentConfig
    site: Site
    limits: RolloutConfig
    phases: Phases
    max_new_tokens: int
    trials_dir: Path
    seal: bool = True
    policy_use: GatewayConfig = field(default_factory=GatewayConfig)
    new_session: Callable[[str, Sampling, SessionLimits], Session] | None = None
    """Opens a session with another policy than the gateway's. None: the gateway's own."""

    async def run(self, attempt: Attempt) -> Rollout:
        """Make the attempt. Any error becomes a failure of the rollout; only cancellation is raised."""
        once = _SessionOnce(self.gateway, self.open_session(attempt))
        try:
            outcome = await self._outcome(attempt, once)
        finally:
            recording = once.close()
        return rollout_of(attempt.place, outcome, recording, must_ask=must_ask(self.agent))

    def open_session(self, attempt: Attempt) -> Session:
        """Open the session through which the attempt's agent calls the policy."""
        sampling = Sampling(seed=attempt.seed, temperature=attempt.temperature, max_new_tokens=self.max_new_tokens)
        limits = SessionLimits(
            max_calls=self.policy_use.max_calls,
            max_sampled_tokens=self.policy_use.max_sampled_tokens,
            max_concurrency=self.policy_use.max_concurrency,
        )
        session = (self.new_session or self.gateway.new_session)(attempt.name, sampling, limits)
        self.gateway.host(session)
        return session

    async def _outcome(self, attempt: Attempt, once: "_SessionOnce") -> Outcome:
        shutil.rmtree(self.trials_dir / attempt.name, ignore_errors=True)  # of an earlier attempt
        limit_s = self.total_timeout_s(attempt.task)
        with self.phases.slot() as slot:
            try:
                async with asyncio.timeout(limit_s) as deadline:
                    trial = await Trial.create(self.trial_config(attempt, once.session.key))
                    _attach(trial, slot, deadline, once)
                    outcome = outcome_of(await trial.run())
                    return replace(outcome, seconds=outcome.seconds | {"waiting": slot.waited_s})
            except TimeoutError:
                message = f"not done after {limit_s:g} s (`rollout.total_timeout_s`), stopped while {slot.phase}"
                return Outcome(exception=_TIMEOUT_IN[slot.phase], message=message)
            except Exception as error:  # a bad trial is data, whatever Harbor and the environment raise
                return Outcome(exception=type(error).__name__, message=str(error))

    def trial_config(self, attempt: Attempt, key: str) -> TrialConfig:
        """Return Harbor's settings for this attempt. `key` is the agent's."""
        task, limits = attempt.task, self.limits
        # Harbor's own upper limit does not apply to a task that has none.
        agent_timeout_s = min(limits.agent_timeout_s, task.agent_timeout_s or math.inf)
        verifier_timeout_s = self._verifier_timeout_s(task)
        return TrialConfig(
            task=TrialTaskConfig(path=task.path),
            trial_name=attempt.name,
            trials_dir=self.trials_dir,
            agent=agent_config(
                self.agent,
                Endpoint(root_url=self.agents_url, key=key),
                timeout_s=agent_timeout_s,
                setup_timeout_s=limits.setup_timeout_s,
            ),
            environment=self.site.environment,
            environment_build_timeout_multiplier=min(1.0, limits.build_timeout_s / task.build_timeout_s),
            verifier=TrialVerifierConfig(
                import_path=VERIFIER,
                kwargs={"timeout_s": verifier_timeout_s, "seal": self.seal},
                override_timeout_sec=2 * verifier_timeout_s + _SLACK_S,  # it may grade twice
            ),
        )

    def _verifier_timeout_s(self, task: Task) -> float:
        return self.limits.verifier_timeout_s or task.verifier_timeout_s

    def total_timeout_s(self, task: Task) -> float:
        """Return the time limit of a whole rollout."""
        limits = self.limits
        phases = limits.build_timeout_s, limits.setup_timeout_s, limits.agent_timeout_s
        return limits.total_timeout_s or sum(phases) + 2 * self._verifier_timeout_s(task) + 3 * _SLACK_S


@dataclass(slots=True)
class _SessionOnce:
    """A session that is closed once, when its agent's time is over: later calls get no answer."""

    gateway: Gateway
    session: Session
    _recording: Recording | None = None

    def close(self) -> Recording:
        if self._recording is None:
            self._recording = self.gateway.close_session(self.session)
        return self._recording


def _attach(trial: Trial, slot: PhaseSlot, deadline: asyncio.Timeout, once: _SessionOnce) -> None:
    """Take the trial through the phases as Harbor announces them. Waiting for a slot does not count as trial time."""

    def entering(phase: Phase) -> Callable[[TrialHookEvent], Awaitable[None]]:
        async def enter(_: TrialHookEvent) -> None:
            when = deadline.when()
            deadline.reschedule(None)
            waited_s = await slot.enter(phase)
            deadline.reschedule(when + waited_s if when is not None else None)

        return enter

    async def rest(_: TrialHookEvent) -> None:
        slot.leave()
        if not trial.task.has_steps:
            once.close()

    trial.add_hook(TrialEvent.ENVIRONMENT_START, entering(Phase.BUILDING))
    trial.add_hook(TrialEvent.AGENT_START, entering(Phase.RUNNING))
    trial.add_hook(TrialEvent.AGENT_END, rest)
    trial.add_hook(TrialEvent.VERIFICATION_START, entering(Phase.VERIFYING))
