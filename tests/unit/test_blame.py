from typing import Any

import pytest

from dockyard.config import AgentConfig
from dockyard.gateway.accounting import Recording
from dockyard.rollout.agents.wiring import must_ask
from dockyard.rollout.blame import CAUSES, Guilt, failure_of, is_worth_retrying
from dockyard.types import Blame

NEVER_THE_POLICY = {
    *("environment_build", "image_missing", "environment_timeout", "docker_unreachable", "host_error"),
    *("agent_missing", "agent_setup_timeout", "setup_error", "no_model_call", "cancelled"),
    *("engine_failed", "engine_down", "wrong_model", "context_too_small"),
}


def blame(exception: str, *, calls: int, answered: int | None = None, **refusals: Any):
    answered = calls if answered is None else answered
    recording = Recording(segments=(), stats={}, calls=calls, answered=answered, **refusals)
    failure = failure_of(exception, "m", recording)
    return failure and (failure.cause, failure.blame)


def test_the_policy_can_never_cause_these_and_no_others():
    assert {cause.name for cause in CAUSES if cause.guilt is Guilt.NEVER} == NEVER_THE_POLICY


def test_no_exception_stands_in_two_rows():
    named = [exception for cause in CAUSES for exception in cause.exceptions]
    assert len(named) == len(set(named))


@pytest.mark.parametrize(
    ("exception", "cause"), [(exception, cause.name) for cause in CAUSES for exception in cause.exceptions]
)
def test_every_row_is_innocent_before_the_first_call_and_the_policys_after_unless_it_never_can_be(
    exception: str, cause: str
):
    assert blame(exception, calls=0) == (cause, Blame.INFRASTRUCTURE)
    expected = Blame.INFRASTRUCTURE if cause in NEVER_THE_POLICY else Blame.POLICY
    assert blame(exception, calls=1) == (cause, expected)


def test_an_unknown_error_is_the_agents_after_its_first_call_and_the_setups_before():
    assert blame("StrangeError", calls=2) == ("agent_error", Blame.POLICY)
    assert blame("StrangeError", calls=0) == ("setup_error", Blame.INFRASTRUCTURE)


def test_a_failing_engine_explains_whatever_followed():
    assert blame("NonZeroAgentExitCodeError", calls=3, engine_failure="out of memory") == (
        "engine_failed",
        Blame.INFRASTRUCTURE,
    )


def test_an_overflow_without_an_error_is_a_failure_and_nothing_at_all_is_none():
    assert blame("", calls=2, answered=1, overflow="too long") == ("context_overflow", Blame.POLICY)
    assert blame("", calls=1) is None


def test_an_agent_that_needs_its_model_and_never_asks_has_not_begun():
    failure = failure_of("", "", Recording(stats={}, calls=0, answered=0), must_ask=True)
    assert failure is not None
    assert (failure.cause, failure.blame) == ("no_model_call", Blame.INFRASTRUCTURE)
    assert is_worth_retrying(failure)
    assert failure_of("", "", Recording(stats={}, calls=1, answered=1), must_ask=True) is None
    assert [must_ask(AgentConfig(name=name)) for name in ("qwen-coder", "shell", "oracle", "my:Agent")] == [
        *(True, True, False, False)
    ]


@pytest.mark.parametrize("exception", ["", "NonZeroAgentExitCodeError"])
@pytest.mark.parametrize(("refusal", "cause"), [("overflow", "context_too_small"), ("misuse", "wrong_model")])
def test_a_policy_that_was_never_asked_anything_it_could_answer_is_not_to_blame(
    exception: str, refusal: str, cause: str
):
    assert blame(exception, calls=1, answered=0, **{refusal: "m"}) == (cause, Blame.INFRASTRUCTURE)


def test_an_agent_that_gives_up_at_a_limit_failed_by_its_policy():
    assert blame("", calls=2, limit="this session is limited to 2 calls") == ("model_limit", Blame.POLICY)
    assert blame("AgentTimeoutError", calls=2, limit="m") == ("agent_timeout", Blame.POLICY)


def test_an_agent_that_ran_out_of_time_while_the_engine_was_down_is_tried_again():
    assert blame("AgentTimeoutError", calls=2, engine_down_s=30.0) == ("engine_down", Blame.INFRASTRUCTURE)
    assert blame("AgentTimeoutError", calls=2, engine_down_s=0.2) == ("agent_timeout", Blame.POLICY)
    assert blame("NonZeroAgentExitCodeError", calls=2, engine_down_s=30.0) == ("agent_crash", Blame.POLICY)


def test_only_what_may_go_better_is_tried_again():
    def failure(exception: str, calls: int = 0, answered: int = 0, **recording: Any):
        return failure_of(exception, "m", Recording(stats={}, calls=calls, answered=answered, **recording))

    assert is_worth_retrying(failure("SandboxBuildFailedError"))
    assert is_worth_retrying(failure("", engine_failure="it fell over"))
    assert not is_worth_retrying(failure("AgentMissingError"))
    assert not is_worth_retrying(failure("", calls=1, misuse="another model"))
    assert not is_worth_retrying(failure("AgentTimeoutError", calls=1, answered=1))
    assert not is_worth_retrying(None)
