"""Make rollouts without training, in a run folder, with a live progress line in a terminal.

`prepare` checks everything that can be checked before the folder is made.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dockyard.callbacks import RunCallbacks, load_callbacks
from dockyard.collect.harbor_cli import HarborCliRunner
from dockyard.collect.model_files import ModelFiles
from dockyard.collect.open import check_run, find_model_files, open_pool, open_source
from dockyard.collect.task_sets import check_tasks, task_sets
from dockyard.config import RunConfig
from dockyard.errors import UsageError
from dockyard.rollout.blame import causes_text
from dockyard.rollout.order import Order, Phase
from dockyard.rollout.pool import RolloutPool
from dockyard.rollout.trial import TrialRunner
from dockyard.run_dir.resume import SplitName
from dockyard.run_dir.run import RunDir
from dockyard.types import Group, Rollout, Task


class RolloutProgress:
    """A progress line that counts finished rollouts."""

    def __init__(self, title: str, total: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = Live("", console=self._console, transient=True, refresh_per_second=4)
        self._title, self._total = title, total
        self._rewards: list[float] = []
        self._failures: Counter[str] = Counter()
        self._done = 0
        self._phases = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def finished(self, rollout: Rollout) -> None:
        """Count a finished rollout."""
        self._done += 1
        if rollout.reward is not None:
            self._rewards.append(rollout.reward)
        if rollout.failure:
            self._failures[rollout.failure.cause] += 1
        self._show()

    def phases(self, counts: Mapping[Phase, int]) -> None:
        """Show the number of rollouts in each phase."""
        self._phases = ", ".join(f"{count} {phase}" for phase, count in counts.items() if count)
        self._show()

    def _show(self) -> None:
        if not self._console.is_terminal:
            return
        reward = f"{sum(self._rewards) / len(self._rewards):.2f}" if self._rewards else "-"
        under_way = f" ({self._phases})" if self._phases else ""
        text = f"{self._title}: {self._done}/{self._total}{under_way}  reward {reward}  failures "
        self._live.update(Text(text + causes_text(dict(self._failures))))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRollouts:
    """The model, the adapter and the callbacks, found before the run folder is made."""

    model: ModelFiles | None
    adapter: Path | None = None
    callbacks: RunCallbacks = field(default_factory=RunCallbacks)


def prepare(config: RunConfig, *, split: SplitName, adapter: Path | None = None) -> PreparedRollouts:
    """Raise an error if the run cannot work. Generated tasks are made later, in the run folder."""
    check_run(config)
    if split == "heldout":
        _check_heldout(config)
    check_tasks(config)
    callbacks = load_callbacks(config.callbacks)
    return PreparedRollouts(model=find_model_files(config), adapter=adapter, callbacks=callbacks)


def tasks_of(run: RunDir, split: SplitName) -> list[Task]:
    """Return the training or the held-out tasks of a run."""
    sets = task_sets(run)
    return sets.train if split == "train" else sets.heldout


def _check_heldout(config: RunConfig) -> None:
    if not config.tasks.holds_out:
        hint = "`--tasks.heldout DIR` names a folder of Harbor tasks; `--split train` takes those of the training"
        raise UsageError("`tasks.heldout` is not set, so there is nothing to attempt", hint=hint)


async def gather(
    run: RunDir, prepared: PreparedRollouts, order: Order, *, title: str, harbor_cli: bool = False
) -> tuple[Group, ...]:
    """Make the rollouts of an order, and read those that are already recorded."""
    with RolloutProgress(title, len(order.tasks) * order.group_size) as progress:
        async with (
            open_source(run.config, prepared.model, prepared.adapter, log=run.paths.engine_log) as source,
            open_pool(run.config, run, source.engine, source.renderer, progress.phases, prepared.callbacks) as pool,
        ):
            pool = _by_command(pool) if harbor_cli else pool
            return await pool.collect(order, progress.finished)


def _by_command(pool: RolloutPool) -> RolloutPool:
    assert isinstance(pool.runner, TrialRunner)
    return replace(pool, runner=HarborCliRunner.like(pool.runner))


def rollouts_in(groups: Sequence[Group]) -> list[Rollout]:
    """Return the rollouts of all groups."""
    return [rollout for group in groups for rollout in group.rollouts]
