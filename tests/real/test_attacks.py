"""Attacks on the reward in real sandboxes."""

import re
from pathlib import Path

import pytest
from attacks import ATTACKS, CONTROLS, UNGUARDED
from rows import Batch, environment_of, names, run_chosen, skip_unless_possible

from dockyard.rollout.sandbox.check import choose_mechanism

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def mechanism(request: pytest.FixtureRequest) -> str:
    return skip_unless_possible(request.param)


@pytest.fixture(scope="module")
def batch(request: pytest.FixtureRequest, mechanism: str, tmp_path_factory: pytest.TempPathFactory) -> Batch:
    return run_chosen(request, (*ATTACKS, *CONTROLS, *UNGUARDED), mechanism, tmp_path_factory.mktemp("attacks"))


@pytest.mark.parametrize("row", names(ATTACKS, "sandbox"))
def test_an_attack_scores_nothing(row: str, batch: Batch):
    assert batch[row].rollout.reward == 0.0, batch[row]


@pytest.mark.parametrize("row", names((*CONTROLS, *UNGUARDED), "sandbox"))
def test_honest_work_scores_and_what_is_not_guarded_against_works(row: str, batch: Batch, mechanism: str):
    [wanted] = [known for known in (*CONTROLS, *UNGUARDED) if known.name == row]
    lacks_terminals = row.startswith("tmux") and not choose_mechanism(environment_of(mechanism).sandbox).has_terminals
    reward = 0.0 if lacks_terminals else wanted.reward
    assert (batch[row].rollout.reward, batch[row].rollout.failure) == (reward, None)


def test_attacks_leave_nothing_running(batch: Batch):
    assert batch.left_behind == []


def test_the_guide_lists_every_attack_that_is_tried_in_a_sandbox():
    guide = (Path(__file__).parents[2] / "docs/guides/rollouts.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| 0 \| 0 \| 0 \|$", guide, re.MULTILINE)
    assert listed == names(ATTACKS, "sandbox")
