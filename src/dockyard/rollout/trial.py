"""Run one Harbor Trial and turn it into one Rollout. Only this file runs trials.

A rollout passes through phases, and each phase has its own limit on concurrent rollouts.
"""

import asyncio
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from harbor import Trial, TrialConfig, TrialEvent, TrialHookEvent, TrialTaskConfig, TrialVerifierConfig

from dockyard.config import AgentConfig, GatewayConfig, RolloutConfig
from dockyard.gateway.accounting import Recording, SessionLimits
from dockyard.gateway.server import Gateway
from dockyard.gateway.sessions import Sampling, Session
from dockyard.rollout.agents.rows import must_ask
from dockyard.rollout.agents.wiring import Endpoint, agent_config
from dockyard.rollout.environments import Site
from dockyard.rollout.order import Attempt, Phase
from dockyard.rollout.outcome import Outcome, outcome_of, rollout_of
from dockyard.rollout.verifier import VERIFIER
from dockyard.types import Rollout, Task

type OnChange = Callable[[Mapping[Phase, int]], None]


def _nobody(_: Mapping[Phase, int]) -> None: ...


class Phases:
    """The slots of each phase, shared by all rollouts of a run."""

    def __init__(self, config: RolloutConfig, on_change: OnChange = _nobody) -> None:
        limits = {
            Phase.BUILDING: config.max_building,
            Phase.RUNNING: config.max_running,
            Phase.VERIFYING: config.max_verifying,
        }
        self._slots = {phase: asyncio.Semaphore(limit or config.concurrency) for phase, limit in limits.items()}
        self._counts: Counter[Phase] = Counter()
        self._on_change = on_change

    @contextmanager
    def passage(self) -> Generator["PhaseSlot"]:
        """One rollout's way through. Its slot is free again however the block ends."""
        passage = PhaseSlot(self)
        try:
            yield passage
        finally:
            passage.leave()

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
    """Holds at most one slot: that of the phase the rollout is in."""

    phases: Phases
    phase: Phase | None = None
    """The last one it was in."""
    waited_s: float = 0.0
    _holds: Phase | None = field(default=None)

    async def enter(self, phase: Phase) -> float:
        """Give the present slot back and wait for the next; returns for how long."""
        self.leave()
        started = time.monotonic()
        await self.phases.take(phase)
        self._holds = self.phase = phase
        waited = time.monotonic() - started
        self.waited_s += waited
        return waited

    def leave(self) -> None:
        if self._holds is not None:
            self.phases.give_back(self._holds)
            self._holds = None


# pyright: reportMissingTypeStubs=false


_SLACK_S = 60.0
"""For what happens between the phases: copying files in and out, taking the environment down."""
_CUT_IN = {
    Phase.BUILDING: "EnvironmentStartTimeoutError",
    Phase.RUNNING: "RolloutTimeoutError",
    Phase.VERIFYING: "VerifierTimeoutError",
}
"""What it means that the whole rollout's time is up, by phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunner:
    """What all rollouts of a run have in common."""

    gateway: Gateway
    agents_url: str
    """The gateway's root as this run's agents reach it."""
    agent: AgentConfig
    site: Site
    limits: RolloutConfig
    phases: Phases
    max_new_tokens: int
    trials_dir: Path
    seal: bool = True
    policy_use: GatewayConfig = field(default_factory=GatewayConfig)
    new_session: Callable[[str, Sampling, SessionLimits], Session] | None = None
    """Where a rollout does not sample from what the gateway does: its own access to a policy."""

    async def run(self, attempt: Attempt) -> Rollout:
        """Make the attempt. Whatever breaks it is a failure on the rollout; only cancellation is raised."""
        books = _SessionOnce(self.gateway, self.open_session(attempt))
        try:
            outcome = await self._outcome(attempt, books)
        finally:
            recording = books.close()
        return rollout_of(attempt.place, outcome, recording, must_ask=must_ask(self.agent))

    def open_session(self, attempt: Attempt) -> Session:
        """The attempt's own access to the policy."""
        sampling = Sampling(seed=attempt.seed, temperature=attempt.temperature, max_new_tokens=self.max_new_tokens)
        limits = SessionLimits(
            max_calls=self.policy_use.max_calls,
            max_sampled_tokens=self.policy_use.max_sampled_tokens,
            max_concurrency=self.policy_use.max_concurrency,
        )
        session = (self.new_session or self.gateway.new_session)(attempt.name, sampling, limits)
        self.gateway.host(session)
        return session

    async def _outcome(self, attempt: Attempt, books: "_SessionOnce") -> Outcome:
        shutil.rmtree(self.trials_dir / attempt.name, ignore_errors=True)  # of an earlier try
        limit_s = self.total_timeout_s(attempt.task)
        with self.phases.passage() as passage:
            try:
                async with asyncio.timeout(limit_s) as deadline:
                    trial = await Trial.create(self.trial_config(attempt, books.session.key))
                    _attach(trial, passage, deadline, books)
                    outcome = outcome_of(await trial.run())
                    return replace(outcome, seconds=outcome.seconds | {"waiting": passage.waited_s})
            except TimeoutError:
                phase = passage.phase or Phase.BUILDING
                message = f"not done after {limit_s:g} s (`rollout.total_timeout_s`), cut while {phase}"
                return Outcome(exception=_CUT_IN[phase], message=message)
            except Exception as error:  # a bad trial is data, whatever Harbor and the environment raise
                return Outcome(exception=type(error).__name__, message=str(error))

    def trial_config(self, attempt: Attempt, key: str) -> TrialConfig:
        """Harbor's settings for this attempt, whose agent has this key."""
        task, limits = attempt.task, self.limits
        # Harbor's own upper limit does not bind a task that has none.
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
        """For a whole rollout, from first to last."""
        limits = self.limits
        phases = limits.build_timeout_s, limits.setup_timeout_s, limits.agent_timeout_s
        return limits.total_timeout_s or sum(phases) + 2 * self._verifier_timeout_s(task) + 3 * _SLACK_S


@dataclass(slots=True)
class _SessionOnce:
    """A session that is closed once, when its agent's time is over: what still runs then gets no more answers."""

    gateway: Gateway
    session: Session
    _recording: Recording | None = None

    def close(self) -> Recording:
        if self._recording is None:
            self._recording = self.gateway.close_session(self.session)
        return self._recording


def _attach(trial: Trial, passage: PhaseSlot, deadline: asyncio.Timeout, books: _SessionOnce) -> None:
    """Take the trial through the phases as Harbor announces them. Waiting for a phase costs no time of the trial's."""

    async def enter(phase: Phase) -> None:
        when = deadline.when()
        deadline.reschedule(None)
        waited_s = await passage.enter(phase)
        deadline.reschedule(when + waited_s if when is not None else None)

    async def build(_: TrialHookEvent) -> None:
        await enter(Phase.BUILDING)

    async def work(_: TrialHookEvent) -> None:
        await enter(Phase.RUNNING)

    async def rest(_: TrialHookEvent) -> None:
        passage.leave()
        if not trial.task.has_steps:
            books.close()

    async def verify(_: TrialHookEvent) -> None:
        await enter(Phase.VERIFYING)

    for event, hook in (
        (TrialEvent.ENVIRONMENT_START, build),
        (TrialEvent.AGENT_START, work),
        (TrialEvent.AGENT_END, rest),
        (TrialEvent.VERIFICATION_START, verify),
    ):
        trial.add_hook(event, hook)
