"""Whose fault a failed rollout is.

What happens before the agent's first model call cannot be the policy's doing, nor can a failing engine: such a
rollout is tried again, then dropped. Anything later the policy may have caused, so it keeps its verified reward, or 0:
a policy that learns to break its sandbox must not profit.
"""

from dockyard.types import Blame, Failure

CAUSES: dict[str, str] = {
    "AgentTimeoutError": "agent_timeout",
    "AgentSetupTimeoutError": "agent_setup_timeout",
    "NonZeroAgentExitCodeError": "agent_crash",
    "ContextLengthExceededError": "context_overflow",
    "ContextWindowExceededError": "context_overflow",
    "OutputLengthExceededError": "output_limit",
    "OutputTokenExceededError": "output_limit",
    "EnvironmentStartTimeoutError": "environment_timeout",
    "SandboxBuildFailedError": "environment_build",
    "SandboxDiedError": "environment_died",
    "HealthcheckError": "environment_unhealthy",
    "MemoryLimitExceededError": "out_of_memory",
    "SandboxLikelyOutOfMemoryError": "out_of_memory",
    "AddTestsDirError": "verifier_upload",
    "DownloadVerifierDirError": "verifier_download",
    "VerifierTimeoutError": "verifier_timeout",
    "RewardFileNotFoundError": "reward_missing",
    "RewardFileEmptyError": "reward_empty",
    "VerifierOutputParseError": "reward_unreadable",
    "CancelledError": "cancelled",
    "OSError": "host_error",  # no space, no file descriptors, a failing disk: the sandbox has its own errors
    "RolloutTimeoutError": "rollout_timeout",
}
"""Exception type, as Harbor or we name it -> cause. Any other type is `agent_error`, or `setup_error` before a call."""

_NEVER_THE_POLICY = ("cancelled", "host_error", "environment_build", "environment_timeout", "agent_setup_timeout")


def failure_of(
    exception: str, message: str, *, num_calls: int, overflowed: bool, engine_failure: str | None
) -> Failure | None:
    """What went wrong, None when nothing did. `exception` is the type's name, empty when none was raised."""
    if engine_failure is not None:
        return Failure(cause="engine_failed", blame=Blame.INFRASTRUCTURE, message=engine_failure)
    if not exception:
        if overflowed:
            return Failure(cause="context_overflow", blame=Blame.POLICY, message="a prompt did not fit the context")
        return None
    cause = CAUSES.get(exception) or ("agent_error" if num_calls else "setup_error")
    innocent = num_calls == 0 or cause in _NEVER_THE_POLICY
    return Failure(
        cause=cause, blame=Blame.INFRASTRUCTURE if innocent else Blame.POLICY, message=f"{exception}: {message}"[:2000]
    )
