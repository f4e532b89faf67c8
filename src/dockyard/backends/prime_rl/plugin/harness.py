"""A Harbor trial as a verifiers harness: the agent talks to Dockyard's gateway, which calls verifiers' endpoint.

verifiers handles tokens, logprobs and weights, and records them on its trace. Dockyard decides the blame: a failure
that the policy can have caused keeps its reward or gets 0; any other makes an errored trace, which is not trained on.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.runtimes import ProgramResult

from dockyard.backends.prime_rl.plugin.taskset import HarborTaskData
from dockyard.backends.prime_rl.plugin.trials import Trials, attempt_of, run_to_the_end
from dockyard.backends.prime_rl.toml import PLUGIN
from dockyard.collect.open import NoModel, check_run, open_runner
from dockyard.config import AgentConfig, EnvironmentConfig, RolloutConfig, RunConfig
from dockyard.engine.http import ModelServer
from dockyard.engine.openai import TextEndpoint
from dockyard.errors import EngineError, UsageError
from dockyard.gateway.accounting import SessionLimits
from dockyard.gateway.protocol import RefusedError
from dockyard.gateway.sessions import Sampling
from dockyard.gateway.text_session import EndpointEcho, TextSession
from dockyard.rollout.trial import TrialRunner
from dockyard.run_dir.paths import RunPaths
from dockyard.settings.load import load_run_config
from dockyard.tasks.folder import load_tasks
from dockyard.types import Json, Rollout, Task

_OVERFLOW = "context_length"
"""verifiers' stop condition of a rollout whose prompt exceeds the context."""


@dataclass(frozen=True, slots=True)
class Interception:
    """Implements `TextSource` for one rollout."""

    endpoint: TextEndpoint
    trace: vf.Trace

    @property
    def down_s(self) -> float:
        return self.endpoint.down_s

    async def chat(self, body: Json) -> Json:
        try:
            return await self.endpoint.chat(body)
        except EngineError as error:
            stopped = self.trace.stop_condition
            if stopped is None or stopped == _OVERFLOW:  # the session recognises an overflow by its message
                raise
            # The policy has reached a limit of verifiers: the engine has not failed.
            raise RefusedError(403, "calls_limit_reached", f"verifiers ended this rollout: {stopped}") from error

    def open_session(self, label: str, sampling: Sampling, limits: SessionLimits) -> TextSession:
        """verifiers identifies a history by its messages, so it must get its own turns back verbatim."""
        return TextSession(label, sampling, limits, self, EndpointEcho())


@asynccontextmanager
async def intercepted(url: str, secret: str, trace: vf.Trace, *, retry_s: float) -> AsyncGenerator[Interception]:
    """Open the endpoint of one rollout. Calls are retried for `retry_s` before they fail."""
    server = ModelServer(url, api_key=secret, retry_s=retry_s)
    try:
        yield Interception(TextEndpoint(server, "policy"), trace)  # verifiers replaces it by the real name
    finally:
        await server.close()


_MARGIN_S = 60.0
"""How much earlier than at verifiers' limit a rollout ends: verifiers drops it, Dockyard gives it a reward of 0."""
_UNBOUNDED = 4096
"""Concurrent rollouts. The caller limits them."""


class HarborHarnessConfig(vf.HarnessConfig):
    """Which agent attempts the tasks, and where."""

    id: str = PLUGIN
    agent: str = "terminus-2"
    """An agent that `dockyard agents` lists."""
    environment_type: str = "docker"
    """`sandbox`, `docker`, or any other Harbor environment."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turn limit of the agent. None: the agent's own."""
    agent_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the agent's constructor."""
    environment_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the environment's constructor."""
    trials_dir: Path = Path("outputs/trials")
    """Folder for Harbor's files of each rollout."""
    run_dir: Path | None = None
    """Folder of a run that `dockyard backend` started. Its settings replace the fields above."""


class HarborHarness(vf.Harness[HarborHarnessConfig]):
    """Runs trials in Harbor environments. verifiers' runtime is not used."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    def __init__(self, config: HarborHarnessConfig) -> None:
        super().__init__(config)
        self._run = run_config(config)
        check_run(self._run)
        trials = RunPaths(config.run_dir).trials if config.run_dir else config.trials_dir
        self._trials = Trials(partial(open_runner, self._run, NoModel(), None, trials=trials.absolute()))

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        """Run one trial. Its environment is removed when this returns, however the trial ends."""
        if not isinstance(data, HarborTaskData):
            message = f"the harness `{PLUGIN}` cannot attempt a `{type(data).__name__}`"
            raise UsageError(message, hint=f'`taskset = {{id = "{PLUGIN}", ...}}` provides Harbor tasks')
        async with intercepted(endpoint, secret, trace, retry_s=self._run.engine.retry_s) as source:
            rollout = await run_to_the_end(self._attempt(data, trace, source))
        trace.info[PLUGIN] = _trial_info(rollout)
        if rollout.reward is None:
            raise vf.HarnessError(trace.info[PLUGIN]["failure"])
        return ProgramResult(exit_code=0, stdout="", stderr="")

    async def _attempt(self, data: HarborTaskData, trace: vf.Trace, source: Interception) -> Rollout:
        task = replace(load_tasks(Path(data.task_dir))[0], name=data.name or Path(data.task_dir).name)
        seed = int.from_bytes(blake2b(trace.id.encode(), digest_size=4).digest())
        attempt = attempt_of(task, trace.id, seed=seed, temperature=self._run.sampling.temperature)
        async with self._trials.runner() as shared:
            runner = replace(shared, new_session=source.open_session, limits=_limits(shared, task, trace, data))
            return await runner.run(attempt)


def run_config(config: HarborHarnessConfig) -> RunConfig:
    """Return the settings of the run in `run_dir`, or settings made from the other fields."""
    if config.run_dir is None:
        return RunConfig(
            agent=AgentConfig(name=config.agent, max_turns=config.max_turns, kwargs=config.agent_kwargs),
            environment=EnvironmentConfig(type=config.environment_type, kwargs=config.environment_kwargs),
            rollout=RolloutConfig(concurrency=_UNBOUNDED),
        )
    given, default = config.model_dump(), HarborHarnessConfig.model_validate({}).model_dump()
    for name in ("agent", "environment_type", "max_turns", "agent_kwargs", "environment_kwargs", "trials_dir"):
        if given[name] != default[name]:
            message = f"`{name}` is `{given[name]}`, but `run_dir` names a run that has its own settings"
            raise UsageError(message, hint=f"remove `{name}`, or set it in the run file and start the run again")
    return load_run_config(RunPaths(config.run_dir).config, [])


def _limits(runner: TrialRunner, task: Task, trace: vf.Trace, data: HarborTaskData) -> RolloutConfig:
    theirs = trace.agent.config.timeout.rollout if trace.agent and trace.agent.config else None
    theirs_s = data.timeout.agent if theirs is None else theirs
    if theirs_s is None:
        return runner.limits
    limit_s = min(runner.total_timeout_s(task), theirs_s - min(_MARGIN_S, theirs_s / 2))
    return runner.limits.model_copy(update={"total_timeout_s": limit_s})


def _trial_info(rollout: Rollout) -> dict[str, Any]:
    """Return what is recorded on the trace."""
    failure = rollout.failure
    return {
        "reward": rollout.reward,
        "cause": failure.cause if failure else None,
        "blame": failure.blame.value if failure else None,
        "failure": f"{failure.cause}: {failure.message}" if failure else None,
        "seconds": rollout.seconds,
        "stats": rollout.stats,
    }
