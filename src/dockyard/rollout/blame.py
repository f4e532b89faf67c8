"""Whose fault a failed rollout is.

What happens before the agent's first model call cannot be the policy's doing, nor can a failing engine: such a
rollout is tried again, then dropped. Anything later the policy may have caused, so it keeps its verified reward, or 0:
a policy that learns to break its sandbox must not profit.
"""

from dockyard.gateway.ledger import Recording
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


def failure_of(exception: str, message: str, recording: Recording) -> Failure | None:
    """What went wrong, None when nothing did. `exception` is the type's name, empty when none was raised."""
    if recording.engine_failure is not None:
        return Failure(cause="engine_failed", blame=Blame.INFRASTRUCTURE, message=recording.engine_failure)
    if failure := _misconfigured(recording):
        return failure
    if not exception:
        return _unfinished(recording)
    cause = CAUSES.get(exception) or ("agent_error" if recording.calls else "setup_error")
    innocent = recording.calls == 0 or cause in _NEVER_THE_POLICY
    return Failure(
        cause=cause, blame=Blame.INFRASTRUCTURE if innocent else Blame.POLICY, message=f"{exception}: {message}"[:2000]
    )


def _misconfigured(recording: Recording) -> Failure | None:
    """A policy that never got to say anything is not to blame for the settings."""
    if recording.answered:
        return None
    for cause, refusal in (("wrong_model", recording.misuse), ("context_too_small", recording.overflow)):
        if refusal:
            return Failure(cause=cause, blame=Blame.INFRASTRUCTURE, message=f"the agent's first call: {refusal}")
    return None


def _unfinished(recording: Recording) -> Failure | None:
    """An agent that gave up without an error because its calls were refused."""
    for cause, refusal in (("context_overflow", recording.overflow), ("model_limit", recording.limit)):
        if refusal:
            return Failure(cause=cause, blame=Blame.POLICY, message=refusal)
    return None
