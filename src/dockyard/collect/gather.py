"""Rollouts that train nothing: what can fail is found first, then one order is made in a run folder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dockyard.collect import check_run, open_pool
from dockyard.collect.harbor_cli import HarborCliRunner
from dockyard.collect.policy import Model, find, opened
from dockyard.collect.progress import Progress
from dockyard.collect.task_sets import check_tasks, task_sets
from dockyard.config import RunConfig
from dockyard.errors import UsageError
from dockyard.rollout.pool import Order, Pool
from dockyard.rollout.trial import TrialRunner
from dockyard.run_dir import RunDir
from dockyard.run_dir.purpose import Split
from dockyard.types import Group, Rollout, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What was found before the run's folder was made."""

    model: Model | None
    adapter: Path | None = None


def prepare(config: RunConfig, *, split: Split, adapter: Path | None = None) -> Prepared:
    """Refuse what cannot run. Tasks that are made are made later, in the run's folder."""
    check_run(config)
    if split == "heldout":
        _check_heldout(config)
    check_tasks(config)
    return Prepared(model=find(config), adapter=adapter)


def tasks_of(run: RunDir, split: Split) -> list[Task]:
    """The tasks of one half of the run's."""
    sets = task_sets(run)
    return sets.train if split == "train" else sets.heldout


def _check_heldout(config: RunConfig) -> None:
    if not config.tasks.holds_out:
        hint = "`--tasks.heldout DIR` names a folder of Harbor tasks; `--split train` takes those of the training"
        raise UsageError("`tasks.heldout` is not set, so there is nothing to attempt", hint=hint)


async def gather(
    run: RunDir, prepared: Prepared, order: Order, *, title: str, harbor_cli: bool = False
) -> tuple[Group, ...]:
    """Make this order's rollouts, or read those that are recorded."""
    with Progress(title, len(order.tasks) * order.group_size) as progress:
        async with (
            opened(run.config, prepared.model, prepared.adapter, log=run.engine_log) as policy,
            open_pool(run.config, run, policy.engine, policy.renderer, progress.phases) as pool,
        ):
            pool = _by_command(pool) if harbor_cli else pool
            return await pool.collect(order, progress.finished)


def _by_command(pool: Pool) -> Pool:
    assert isinstance(pool.runner, TrialRunner)
    return replace(pool, runner=HarborCliRunner.like(pool.runner))


def rollouts_in(groups: Sequence[Group]) -> list[Rollout]:
    """All of them, group by group."""
    return [rollout for group in groups for rollout in group.rollouts]
