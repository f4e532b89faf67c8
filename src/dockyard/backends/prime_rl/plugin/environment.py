"""verifiers' environment for a single agent, with defaults for Harbor trials."""

from typing import Self

import verifiers.v1 as vf
from pydantic import model_validator


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
