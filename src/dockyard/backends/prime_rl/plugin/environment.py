"""verifiers' environment of one agent, with what a Harbor trial needs as its defaults."""

from typing import Self

import verifiers.v1 as vf
from pydantic import model_validator


class HarborEnvironmentConfig(vf.SingleAgentEnvConfig):
    """One agent, whose trials have environments of Harbor's: verifiers' own, a remote one by default, stays unused."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())

    @model_validator(mode="after")
    def _refuse_what_lets_policies_off(self) -> Self:
        if self.timeout.episode is not None:
            raise ValueError(
                f"`timeout.episode` is {self.timeout.episode:g}: it drops what it cuts, so that a policy that stalls "
                "would never get its 0; `agent.timeout.rollout` limits rollouts, or `rollout.total_timeout_s`"
            )
        if not isinstance(self.agent.runtime, vf.SubprocessConfig):
            raise ValueError(
                f"`agent.runtime.type` is `{self.agent.runtime.type}`, but trials have environments of their own: "
                "set it to `subprocess`, and the harness's `environment_type` to where the agent is to work"
            )
        return self


# verifiers reads the class of the settings from the second base.
class HarborEnvironment(vf.SingleAgentEnv, vf.Env[HarborEnvironmentConfig]):  # pyright: ignore[reportGeneralTypeIssues]
    """One rollout is one Harbor trial."""
