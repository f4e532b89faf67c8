"""The table of blame in real containers."""

import os
from pathlib import Path

import pytest
from blame_rows import (
    PROVOKED,
    ROWS,
    UNREACHABLE,
    assert_blamed,
    assert_does_not_pay,
    cancel_at_work,
    uncaused,
)
from rows import Batch, left_behind, names, run_chosen, run_row

from dockyard.config import EnvironmentConfig
from dockyard.rollout.environments import open_site

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")
KNOWN = {row.name: row for row in (*ROWS, *PROVOKED)}


@pytest.fixture(scope="module")
def batch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Batch:
    return run_chosen(request, KNOWN.values(), "docker", tmp_path_factory.mktemp("blame"))


@pytest.mark.parametrize("row", names(ROWS, "docker"))
def test_a_failure_has_its_cause_its_blame_and_its_reward(row: str, batch: Batch):
    assert_blamed(KNOWN[row], batch[row])


@pytest.mark.parametrize("row", names(PROVOKED, "docker"))
def test_a_policy_that_breaks_its_container_gains_nothing(row: str, batch: Batch):
    assert_does_not_pay(KNOWN[row], batch[row])


def test_failures_leave_no_container_behind(batch: Batch):
    assert batch.left_behind == []


async def test_a_cancelled_rollout_leaves_nothing_running(tmp_path: Path):
    assert await cancel_at_work("docker", tmp_path) == []


async def test_an_engine_that_goes_away_in_the_middle_is_not_the_policys_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with open_site(EnvironmentConfig(type="docker", network="none"), inside=False) as site:
        with monkeypatch.context() as patch:
            patch.setenv("DOCKER_HOST", os.environ.get("DOCKER_HOST", ""))  # put back after the row has changed it
            seen = await run_row(UNREACHABLE, site, tmp_path)
    assert_blamed(UNREACHABLE, seen)
    assert await left_behind("docker", [site]) == []


def test_every_cause_is_really_caused_in_some_environment():
    assert uncaused(("docker", "sandbox")) == set()
