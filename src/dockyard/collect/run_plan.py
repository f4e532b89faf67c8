"""Make rollouts without training, in a run folder, with a live progress line in a terminal.

`prepare` checks everything that can be checked before the folder is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dockyard.callbacks import RunCallbacks, load_callbacks
from dockyard.collect.harbor_cli import HarborCliRunner
from dockyard.collect.open import ModelFiles, check_run, find_model_files, open_pool, open_source
from dockyard.collect.progress import RolloutProgress
from dockyard.collect.task_sets import check_tasks, task_sets
from dockyard.config import RunConfig
from dockyard.errors import UsageError
from dockyard.rollout.plan import RolloutPlan
from dockyard.rollout.trial import TrialRunner
from dockyard.run_dir.resume import SplitName
from dockyard.run_dir.run import RunDir
from dockyard.types import Group, Rollout, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRollouts:
    """The model, the adapter and the callbacks, found before the run folder is made."""

    model: ModelFiles | None
    adapter: Path | None = None
    callbacks: RunCallbacks = field(default_factory=RunCallbacks)


def prepare(config: RunConfig, *, split: SplitName, adapter: Path | None = None) -> PreparedRollouts:
    """Raise an error if the run cannot work. Generated tasks are made later, in the run folder."""
    check_run(config)
    if split == "heldout" and not config.tasks.holds_out:
        hint = "`--tasks.heldout DIR` names a folder of Harbor tasks; `--split train` takes those of the training"
        raise UsageError("`tasks.heldout` is not set, so there is nothing to attempt", hint=hint)
    check_tasks(config)
    callbacks = load_callbacks(config.callbacks)
    return PreparedRollouts(model=find_model_files(config), adapter=adapter, callbacks=callbacks)


def tasks_of(run: RunDir, split: SplitName) -> list[Task]:
    """Return the training or the held-out tasks of a run."""
    sets = task_sets(run)
    if split == "heldout" and not sets.heldout:
        hint = "`--tasks.heldout DIR` or `--tasks.heldout_share 0.1` holds out tasks"
        raise UsageError(f"`tasks.source` is `{run.config.tasks.source}`, which has no held-out tasks", hint=hint)
    return sets.train if split == "train" else sets.heldout


def plan_of(
    config: RunConfig,
    phase: str,
    tasks: Sequence[Task],
    group_size: int,
    *,
    temperature: float | None = None,
    retry_lost: bool = True,
) -> RolloutPlan:
    """Return the plan of a phase whose seeds depend on its name. The default temperature is that of training."""
    return RolloutPlan(
        phase=phase,
        tasks=tasks,
        group_size=group_size,
        temperature=config.sampling.temperature if temperature is None else temperature,
        seed=config.seed,
        stream=phase,
        retry_lost=retry_lost,
    )


async def gather(
    run: RunDir, prepared: PreparedRollouts, plan: RolloutPlan, *, title: str, harbor_cli: bool = False
) -> tuple[Group, ...]:
    """Make the rollouts of a plan, and read those that are already recorded."""
    with RolloutProgress(title, len(plan.tasks) * plan.group_size) as progress:
        async with (
            open_source(run.config, prepared.model, prepared.adapter, log=run.paths.engine_log) as source,
            open_pool(run.config, run, source.engine, source.renderer, progress.phases, prepared.callbacks) as pool,
        ):
            if harbor_cli:
                assert isinstance(pool.runner, TrialRunner)
                pool = replace(pool, runner=HarborCliRunner(common=pool.runner))
            return await pool.collect(plan, progress.finished)


def rollouts_in(groups: Sequence[Group]) -> list[Rollout]:
    """Return the rollouts of all groups."""
    return [rollout for group in groups for rollout in group.rollouts]
