import pytest

from dockyard.rollout.blame import CAUSES, failure_of
from dockyard.types import Blame

NEVER_THE_POLICY = {"cancelled", "host_error", "environment_build", "environment_timeout", "agent_setup_timeout"}


def blame(exception: str, *, calls: int, overflowed: bool = False, engine: str | None = None):
    failure = failure_of(exception, "m", num_calls=calls, overflowed=overflowed, engine_failure=engine)
    return failure and (failure.cause, failure.blame)


@pytest.mark.parametrize(("exception", "cause"), CAUSES.items())
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
    assert blame("NonZeroAgentExitCodeError", calls=3, engine="out of memory") == (
        "engine_failed",
        Blame.INFRASTRUCTURE,
    )


def test_an_overflow_without_an_error_is_a_failure_and_nothing_at_all_is_none():
    assert blame("", calls=1, overflowed=True) == ("context_overflow", Blame.POLICY)
    assert blame("", calls=1) is None
