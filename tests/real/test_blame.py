"""The table of blame in real sandboxes."""

from pathlib import Path

import pytest
from blame_rows import PROVOKED, ROWS, assert_blamed, assert_does_not_pay, cancel_at_work
from rows import Batch, names, run_chosen, skip_unless_possible

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")
KNOWN = {row.name: row for row in (*ROWS, *PROVOKED)}


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def batch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Batch:
    mechanism = skip_unless_possible(request.param)
    return run_chosen(request, KNOWN.values(), mechanism, tmp_path_factory.mktemp("blame"))


@pytest.mark.parametrize("row", names(ROWS, "sandbox"))
def test_a_failure_has_its_cause_its_blame_and_its_reward(row: str, batch: Batch):
    assert_blamed(KNOWN[row], batch[row])


@pytest.mark.parametrize("row", names(PROVOKED, "sandbox"))
def test_a_policy_that_breaks_its_sandbox_gains_nothing(row: str, batch: Batch):
    assert_does_not_pay(KNOWN[row], batch[row])


def test_failures_leave_no_process_behind(batch: Batch):
    assert batch.left_behind == []


@pytest.mark.parametrize("mechanism", ["namespaces", "landlock"])
async def test_a_cancelled_rollout_leaves_nothing_running(tmp_path: Path, mechanism: str):
    assert await cancel_at_work(skip_unless_possible(mechanism), tmp_path) == []
