"""verifiers' environment for a single agent, with defaults for Harbor trials.

`load_environment` is the entry point for verifiers before 0.4 and Prime-RL up to 0.8.
"""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import verifiers.v1 as vf
from pydantic import model_validator

from dockyard.config import AgentConfig, EngineConfig, EnvironmentConfig, ModelConfig, RolloutConfig, RunConfig
from dockyard.errors import DockyardError


class HarborEnvironmentConfig(vf.SingleAgentEnvConfig):
    """One agent whose trials run in Harbor environments. verifiers' own runtime, remote by default, is not used."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())

    @model_validator(mode="after")
    def _refuse_unsafe_settings(self) -> Self:
        if self.timeout.episode is not None:
            raise ValueError(
                f"`timeout.episode` is {self.timeout.episode:g}: rollouts that exceed it are dropped, so a policy "
                "that stalls would not get a reward of 0; use `agent.timeout.rollout` or `rollout.total_timeout_s`"
            )
        if not isinstance(self.agent.runtime, vf.SubprocessConfig):
            raise ValueError(
                f"`agent.runtime.type` is `{self.agent.runtime.type}`, but trials run in Harbor environments: "
                "set it to `subprocess`, and choose the environment by the harness's `environment_type`"
            )
        return self


# verifiers takes the settings class from the second base.
class HarborEnvironment(vf.SingleAgentEnv, vf.Env[HarborEnvironmentConfig]):  # pyright: ignore[reportGeneralTypeIssues]
    """One rollout is one Harbor trial."""


def load_environment(
    tasks_dir: str | Path,
    environment_type: str = "docker",
    vllm_base_url: str = "http://localhost:8000/v1",
    model_name: str = "Qwen/Qwen3-8B",
    n_parallel_envs: int = 8,
    max_turns: int | None = None,
    *,
    agent: str = "terminus-2",
    trials_dir: str | Path = "outputs/trials",
) -> Any:
    """Return a legacy environment whose rollouts sample from the vLLM server at `vllm_base_url`."""
    if find_spec("verifiers.legacy") is None:
        raise DockyardError(
            f"verifiers {version('verifiers')} no longer supports `load_environment`",
            hint='name the taskset and the harness by their id: `taskset = {id = "harbor_env", tasks_dir = "..."}`',
        )
    from dockyard.backends.prime_rl.plugin.legacy import LegacyHarborEnvironment

    config = RunConfig(
        model=ModelConfig(name=model_name),
        engine=EngineConfig(type="vllm", url=vllm_base_url),
        agent=AgentConfig(name=agent, max_turns=max_turns),
        environment=EnvironmentConfig(type=environment_type),
        rollout=RolloutConfig(concurrency=n_parallel_envs),
    )
    return LegacyHarborEnvironment(config, Path(tasks_dir).absolute(), Path(trials_dir).absolute())
