"""Runs a check of tasks: the solution and doing nothing on each, then a policy on those that are good.

In the run's folder `rollouts/rollouts.jsonl` holds what the solution (attempt 0) and doing nothing (attempt 1) earned,
`rollouts/eval.jsonl` what the policy did.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from pydantic_core import to_json

from dockyard import interrupt
from dockyard.collect import NoModel, check_run, open_pool
from dockyard.collect.candidates import Candidates
from dockyard.collect.gather import Prepared, gather
from dockyard.collect.policy import find
from dockyard.collect.progress import Progress
from dockyard.collect.quality import (
    QualityReport,
    TaskReport,
    judge_duplicates,
    judge_nop,
    judge_oracle,
    judge_policy,
)
from dockyard.config import AgentConfig, GatewayConfig, RunConfig
from dockyard.errors import DockyardError
from dockyard.rollout.pool import Order, Runner
from dockyard.rollout.trial import Attempt, TrialRunner
from dockyard.run_dir import EVAL, ROLLOUTS, RunDir
from dockyard.run_dir.durable import disk_errors, whole_folder, write_atomically
from dockyard.types import Group, Rollout, Task

_AGENTS = ("oracle", "nop")
"""By attempt."""


def prepare_check(config: RunConfig, *, difficulty: int | None) -> Prepared | None:
    """Refuse what cannot run, before the run's folder is made. None where no policy takes part."""
    check_run(_for_judges(config))
    if not difficulty:
        return None
    check_run(config)
    return Prepared(model=find(config))


def check_tasks(
    run: RunDir, candidates: Candidates, prepared: Prepared | None, *, difficulty: int | None
) -> QualityReport:
    """Run what is not recorded yet, and leave the report in the run's folder."""
    reports = interrupt.run(_check(run, candidates, prepared, difficulty or 0))
    report = QualityReport.of(
        list(reports.values()), folder=candidates.folder, rollouts=run.rollouts_file(ROLLOUTS), trials=run.trials
    )
    run.write_summary(asdict(report))
    return report


def write_report(file: Path, report: QualityReport) -> None:
    """As JSON."""
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, to_json(asdict(report), indent=2, inf_nan_mode="null") + b"\n")


def keep_good(folder: Path, report: QualityReport) -> None:
    """Copy the good tasks to this folder. Those that are there already stay, and nothing is removed."""
    good = {item.task: Path(item.path) for item in report.reports if item.ok}
    there = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    strangers = [name for name in there if name not in good and not name.startswith(".")]
    if strangers:
        hint = "`--keep DIR` with another folder; the report names the good tasks"
        raise DockyardError(f"`{folder}` holds `{min(strangers)}`, which is not one of the good tasks", hint=hint)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in good.items():
            if not (folder / name).exists():
                with whole_folder(folder / name) as draft:
                    shutil.copytree(source, draft, symlinks=True, dirs_exist_ok=True)


async def _check(
    run: RunDir, candidates: Candidates, prepared: Prepared | None, difficulty: int
) -> dict[str, TaskReport]:
    reports = await _gate(run, candidates)
    reports = judge_duplicates(reports, candidates.tasks)
    good = [task for task in candidates.tasks if reports[task.name].ok]
    if not prepared or not good:
        return reports
    order = _order(run, EVAL, good, difficulty, retry_lost=True)
    groups = await gather(run, prepared, order, title="policy")
    return reports | {group.task: judge_policy(reports[group.task], group.rollouts) for group in groups}


async def _gate(run: RunDir, candidates: Candidates) -> dict[str, TaskReport]:
    # Once a policy has begun, what it is given stands: its records are of the tasks that were good then.
    retry_lost = not run.rollouts_file(EVAL).exists()
    order = _order(run, ROLLOUTS, candidates.tasks, len(_AGENTS), retry_lost=retry_lost)
    groups = await _run_judges(run, order) if order.tasks else ()
    trials = [run.trials / attempt.name for attempt in order.attempts()]
    reports = dict(candidates.reports)
    for index, group in enumerate(groups):
        report, (oracle, nop) = reports[group.task], group.rollouts
        report = judge_oracle(report, oracle, trials[index * len(_AGENTS)])
        reports[group.task] = judge_nop(report, nop, trials[index * len(_AGENTS) + 1])
    return reports


def _order(run: RunDir, phase: str, tasks: Sequence[Task], group_size: int, *, retry_lost: bool) -> Order:
    return Order(
        phase=phase,
        tasks=tasks,
        group_size=group_size,
        temperature=run.config.sampling.temperature,
        seed=run.config.seed,
        stream=phase,
        retry_lost=retry_lost,
    )


async def _run_judges(run: RunDir, order: Order) -> tuple[Group, ...]:
    config = _for_judges(run.config)
    with Progress("oracle and nop", len(order.tasks) * order.group_size) as progress:
        async with open_pool(config, run, NoModel(), None, progress.phases) as pool:
            assert isinstance(pool.runner, TrialRunner)
            return await replace(pool, runner=_Judges.like(pool.runner)).collect(order, progress.finished)


def _for_judges(config: RunConfig) -> RunConfig:
    """The same settings for agents that ask no model, to whom the policy's agent and its way to us mean nothing."""
    return config.model_copy(update={"agent": AgentConfig(name=_AGENTS[0]), "gateway": GatewayConfig()})


@dataclass(frozen=True, slots=True)
class _Judges:
    """Implements `Runner`: a runner for each attempt of a task."""

    runners: tuple[Runner, ...]

    @classmethod
    def like(cls, runner: TrialRunner) -> Self:
        return cls(tuple(replace(runner, agent=AgentConfig(name=name)) for name in _AGENTS))

    async def run(self, attempt: Attempt) -> Rollout:
        return await self.runners[attempt.index].run(attempt)
