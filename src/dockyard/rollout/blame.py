"""Decide whether the policy is to blame for a failed rollout: the table of causes, and how a cause is found.

A failure that the policy cannot have caused is retried, then dropped. One that it can have caused keeps its verified
reward, or 0: a policy that learns to break its sandbox, or to hang its tests, must not profit. Harbor records
exceptions by type name, so the types that environments raise are defined here.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dockyard.gateway.accounting import Recording
from dockyard.types import Blame, Failure, Rollout


class SandboxDiedError(Exception):
    """The environment ended before it was stopped: out of memory, or killed."""


class DockerUnreachableError(Exception):
    """The Docker engine does not answer."""


class ImageMissingError(Exception):
    """A task's image does not exist locally and cannot be pulled."""


class SealError(Exception):
    """The agent changed its environment so that it cannot be graded safely."""


class Guilt(StrEnum):
    """When the policy is to blame."""

    NEVER = "never"
    AFTER_CALL = "after its first call"
    """A failure before the first call cannot depend on the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One row of the table: the name of a cause, and the exception types of Harbor or Dockyard that indicate it."""

    name: str
    exceptions: tuple[str, ...] = ()
    guilt: Guilt = Guilt.AFTER_CALL
    retried: bool = True
    """If the policy is not to blame: whether a retry can help."""


CAUSES = (
    Cause(name="environment_build", exceptions=("SandboxBuildFailedError",), guilt=Guilt.NEVER),
    Cause(name="image_missing", exceptions=("ImageMissingError",), guilt=Guilt.NEVER),
    Cause(name="environment_timeout", exceptions=("EnvironmentStartTimeoutError",), guilt=Guilt.NEVER),
    Cause(name="environment_unhealthy", exceptions=("HealthcheckError",)),
    Cause(name="environment_died", exceptions=("SandboxDiedError",)),
    Cause(name="docker_unreachable", exceptions=("DockerUnreachableError",), guilt=Guilt.NEVER),
    Cause(name="out_of_memory", exceptions=("MemoryLimitExceededError", "SandboxLikelyOutOfMemoryError")),
    # The host has no disk space, no file descriptors, or a failing disk. Environments raise their own errors.
    Cause(name="host_error", exceptions=("OSError", "MemoryError", "BlockingIOError"), guilt=Guilt.NEVER),
    Cause(name="agent_missing", exceptions=("AgentMissingError",), guilt=Guilt.NEVER, retried=False),
    Cause(name="agent_setup_timeout", exceptions=("AgentSetupTimeoutError",), guilt=Guilt.NEVER),
    Cause(name="agent_timeout", exceptions=("AgentTimeoutError",)),
    Cause(
        name="agent_crash",
        exceptions=(
            "NonZeroAgentExitCodeError",
            "AgentAuthenticationError",
            "ApiError",
            "ModelNotFoundError",
            "NetworkConnectionError",
            "UnsupportedModelParametersError",
        ),
    ),
    Cause(name="agent_error"),
    Cause(name="setup_error", guilt=Guilt.NEVER),
    Cause(name="no_model_call", guilt=Guilt.NEVER),
    Cause(name="context_overflow", exceptions=("ContextLengthExceededError", "ContextWindowExceededError")),
    Cause(name="output_limit", exceptions=("OutputLengthExceededError", "OutputTokenExceededError")),
    Cause(name="model_limit"),
    Cause(name="seal_failed", exceptions=("SealError",)),
    Cause(name="verifier_upload", exceptions=("AddTestsDirError",)),
    Cause(name="verifier_download", exceptions=("DownloadVerifierDirError",)),
    Cause(name="verifier_timeout", exceptions=("VerifierTimeoutError",)),
    Cause(name="reward_missing", exceptions=("RewardFileNotFoundError",)),
    Cause(name="reward_empty", exceptions=("RewardFileEmptyError",)),
    Cause(name="reward_unreadable", exceptions=("VerifierOutputParseError",)),
    Cause(name="rollout_timeout", exceptions=("RolloutTimeoutError",)),
    Cause(name="engine_failed", guilt=Guilt.NEVER),
    Cause(name="engine_down", guilt=Guilt.NEVER),
    Cause(name="wrong_model", guilt=Guilt.NEVER, retried=False),
    Cause(name="context_too_small", guilt=Guilt.NEVER, retried=False),
    Cause(name="cancelled", exceptions=("CancelledError",), guilt=Guilt.NEVER),
)

BY_NAME = {cause.name: cause for cause in CAUSES}
BY_EXCEPTION = {exception: cause for cause in CAUSES for exception in cause.exceptions}

_OUT_OF_TIME = ("agent_timeout", "rollout_timeout")
_LONG_OUTAGE_S = 1.0


def failure_of(exception: str, message: str, recording: Recording, *, must_ask: bool = False) -> Failure | None:
    """Return the failure of a rollout, or None. `exception` is the type's name, empty if none was raised.

    `must_ask`: this agent cannot work without its model, so one that ended without an error and a call never started.
    """
    if recording.engine_failure is not None:
        return _failure("engine_failed", recording.engine_failure, recording)
    if failure := _misconfigured(recording):
        return failure
    if not exception and must_ask and not recording.calls:
        return _failure("no_model_call", "the agent ended without a model call", recording)
    if not exception:
        return _unfinished(recording)
    other = "agent_error" if recording.calls else "setup_error"
    cause = BY_EXCEPTION.get(exception, BY_NAME[other]).name
    if cause in _OUT_OF_TIME and recording.engine_down_s >= _LONG_OUTAGE_S:
        message = f"the engine was unreachable for {recording.engine_down_s:.0f} s of it; {exception}: {message}"
        return _failure("engine_down", message, recording)
    return _failure(cause, f"{exception}: {message}", recording)


def _misconfigured(recording: Recording) -> Failure | None:
    """Return the failure of a rollout whose calls were all refused because of the settings."""
    if recording.answered:
        return None
    for cause, refusal in (("wrong_model", recording.misuse), ("context_too_small", recording.overflow)):
        if refusal:
            return _failure(cause, f"the agent's first call: {refusal}", recording)
    return None


def _unfinished(recording: Recording) -> Failure | None:
    """Return the failure of an agent that stopped without an error because its calls were refused."""
    for cause, refusal in (("context_overflow", recording.overflow), ("model_limit", recording.limit)):
        if refusal:
            return _failure(cause, refusal, recording)
    return None


def _failure(cause: str, message: str, recording: Recording) -> Failure:
    guilty = BY_NAME[cause].guilt is Guilt.AFTER_CALL and recording.calls > 0
    return Failure(cause=cause, blame=Blame.POLICY if guilty else Blame.INFRASTRUCTURE, message=message[:2000])


def is_worth_retrying(failure: Failure | None) -> bool:
    """Whether the same attempt may succeed if it is retried."""
    return failure is not None and failure.blame is Blame.INFRASTRUCTURE and BY_NAME[failure.cause].retried


def failure_counts(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Return the number of failed rollouts by cause."""
    return dict(Counter(rollout.failure.cause for rollout in rollouts if rollout.failure))


def causes_text(counts: Mapping[str, int]) -> str:
    """Return the failures by cause as a short text."""
    return ", ".join(f"{cause} {count}" for cause, count in sorted(counts.items())) or "none"
