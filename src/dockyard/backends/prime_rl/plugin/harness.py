"""A Harbor trial as a verifiers harness: an agent of any dialect talks to our gateway, which asks verifiers' endpoint.

Tokens, logprobs and weights are verifiers' business, and stored on its trace. Blame is ours: what the policy can have
caused keeps its reward or gets 0; anything else makes an errored trace, which is not trained on.
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

from dockyard.backends.prime_rl.plugin.taskset import PLUGIN, HarborTaskData
from dockyard.backends.prime_rl.plugin.trials import Trials, run_to_the_end
from dockyard.collect.open import NoModel, check_run, open_runner
from dockyard.config import AgentConfig, EnvironmentConfig, RolloutConfig, RunConfig
from dockyard.engine.http import ModelServer
from dockyard.engine.openai import TextEndpoint
from dockyard.errors import EngineError, UsageError
from dockyard.gateway.accounting import SessionLimits
from dockyard.gateway.protocol import RefusedError
from dockyard.gateway.sessions import Sampling
from dockyard.gateway.text_session import Recall, TextSession
from dockyard.rollout.trial import Attempt, TrialRunner
from dockyard.run_dir.paths import RunPaths
from dockyard.settings.load import load_run_config
from dockyard.tasks.sources import load_tasks
from dockyard.types import Json, Rollout, Task

_OVERFLOW = "context_length"
"""What verifiers calls the end of a rollout whose prompt does not fit any more."""


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
            if stopped is None or stopped == _OVERFLOW:  # the session knows an overflow by its words
                raise
            # A limit of verifiers', which the policy has reached: no failure of the engine.
            raise RefusedError(403, "calls_limit_reached", f"verifiers ended this rollout: {stopped}") from error

    def open_session(self, label: str, sampling: Sampling, limits: SessionLimits) -> TextSession:
        """verifiers knows a history by its messages, so that it gets its own turns back word for word."""
        return TextSession(label, sampling, limits, self, Recall())


@asynccontextmanager
async def intercepted(url: str, secret: str, trace: vf.Trace, *, retry_s: float) -> AsyncGenerator[Interception]:
    """The endpoint of one rollout. An engine that fails for longer than `retry_s` has failed."""
    server = ModelServer(url, api_key=secret, retry_s=retry_s)
    try:
        yield Interception(TextEndpoint(server, "policy"), trace)  # verifiers puts the true name there
    finally:
        await server.close()


_MARGIN_S = 60.0
"""Before verifiers' own limit on a rollout: it drops what it cuts, so that ours, which gives 0, must come first."""
_UNBOUNDED = 4096
"""Rollouts at once: how many there are is for who asks for them to say."""


class HarborHarnessConfig(vf.HarnessConfig):
    """Which agent attempts the tasks, and where."""

    id: str = PLUGIN
    agent: str = "terminus-2"
    """Any that `dockyard agents` lists."""
    environment_type: str = "docker"
    """`sandbox`, `docker`, or any other environment of Harbor's."""
    max_turns: int | None = Field(default=None, ge=1)
    """Of the agent. None leaves it to the agent."""
    agent_kwargs: dict[str, Any] = Field(default_factory=dict)
    """For the agent's constructor."""
    environment_kwargs: dict[str, Any] = Field(default_factory=dict)
    """For the environment's constructor."""
    trials_dir: Path = Path("outputs/trials")
    """Where Harbor keeps its files of each rollout."""
    run_dir: Path | None = None
    """The folder of a run that `dockyard backend` began, whose settings say all of this and more."""


class HarborHarness(vf.Harness[HarborHarnessConfig]):
    """Runs trials. They have environments of their own: verifiers' runtime is not used."""

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
        """One trial. However it ends, nothing of it is left when this returns."""
        if not isinstance(data, HarborTaskData):
            message = f"the harness `{PLUGIN}` cannot attempt a `{type(data).__name__}`"
            raise UsageError(message, hint=f'`taskset = {{id = "{PLUGIN}", ...}}` gives it Harbor\'s tasks')
        async with intercepted(endpoint, secret, trace, retry_s=self._run.engine.retry_s) as source:
            rollout = await run_to_the_end(self._attempt(data, trace, source))
        trace.info[PLUGIN] = _told(rollout)
        if rollout.reward is None:
            raise vf.HarnessError(trace.info[PLUGIN]["failure"])
        return ProgramResult(exit_code=0, stdout="", stderr="")

    async def _attempt(self, data: HarborTaskData, trace: vf.Trace, source: Interception) -> Rollout:
        task = replace(load_tasks(Path(data.task_dir))[0], name=data.name or Path(data.task_dir).name)
        attempt = Attempt(
            name=f"{task.path.name[:64]}-{trace.id[:16]}",
            task=task,
            group=0,
            index=0,
            seed=int.from_bytes(blake2b(trace.id.encode(), digest_size=4).digest()),
            temperature=self._run.sampling.temperature,
        )
        async with self._trials.runner() as shared:
            runner = replace(shared, new_session=source.open_session, limits=_limits(shared, task, trace, data))
            return await runner.run(attempt)


def run_config(config: HarborHarnessConfig) -> RunConfig:
    """The settings of the run in `run_dir`, or what the other fields say."""
    if config.run_dir is None:
        return RunConfig(
            agent=AgentConfig(name=config.agent, max_turns=config.max_turns, kwargs=config.agent_kwargs),
            environment=EnvironmentConfig(type=config.environment_type, kwargs=config.environment_kwargs),
            rollout=RolloutConfig(concurrency=_UNBOUNDED),
        )
    given, default = config.model_dump(), HarborHarnessConfig.model_validate({}).model_dump()
    for name in ("agent", "environment_type", "max_turns", "agent_kwargs", "environment_kwargs", "trials_dir"):
        if given[name] != default[name]:
            message = f"`{name}` is `{given[name]}`, but `run_dir` names a run with settings of its own"
            raise UsageError(message, hint=f"remove `{name}`, or set it in the run file and begin the run anew")
    return load_run_config(RunPaths(config.run_dir).config, [])


def _limits(runner: TrialRunner, task: Task, trace: vf.Trace, data: HarborTaskData) -> RolloutConfig:
    theirs = trace.agent.config.timeout.rollout if trace.agent and trace.agent.config else None
    theirs_s = data.timeout.agent if theirs is None else theirs
    if theirs_s is None:
        return runner.limits
    limit_s = min(runner.total_timeout_s(task), theirs_s - min(_MARGIN_S, theirs_s / 2))
    return runner.limits.model_copy(update={"total_timeout_s": limit_s})


def _told(rollout: Rollout) -> dict[str, Any]:
    """What a trace says of its trial."""
    failure = rollout.failure
    return {
        "reward": rollout.reward,
        "cause": failure.cause if failure else None,
        "blame": failure.blame.value if failure else None,
        "failure": f"{failure.cause}: {failure.message}" if failure else None,
        "seconds": rollout.seconds,
        "stats": rollout.stats,
    }
