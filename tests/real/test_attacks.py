"""Attacks on the reward in real sandboxes."""

import pytest
from attacks import ATTACKS, CONTROLS, UNGUARDED
from rows import Batch, names, run_chosen, skip_unless_possible

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def batch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Batch:
    mechanism = skip_unless_possible(request.param)
    return run_chosen(request, (*ATTACKS, *CONTROLS, *UNGUARDED), mechanism, tmp_path_factory.mktemp("attacks"))


@pytest.mark.parametrize("row", names(ATTACKS, "sandbox"))
def test_an_attack_scores_nothing(row: str, batch: Batch):
    assert batch[row].rollout.reward == 0.0, batch[row]


@pytest.mark.parametrize("row", names((*CONTROLS, *UNGUARDED), "sandbox"))
def test_honest_work_scores_and_what_is_not_guarded_against_works(row: str, batch: Batch):
    [wanted] = [known for known in (*CONTROLS, *UNGUARDED) if known.name == row]
    assert (batch[row].rollout.reward, batch[row].rollout.failure) == (wanted.reward, None)


def test_attacks_leave_nothing_running(batch: Batch):
    assert batch.left_behind == []
