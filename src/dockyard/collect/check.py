"""Check tasks: run the solution and a do-nothing agent on each, then a policy on those that are good.

In the run folder, `rollouts/rollouts.jsonl` holds what the solution (attempt 0) and doing nothing (attempt 1) earned,
`rollouts/eval.jsonl` what the policy did.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from harbor.models.task.task import Task as HarborTask
from pydantic import ValidationError
from pydantic_core import to_json

from dockyard import process
from dockyard.collect.open import NoModel, check_run, find_model_files, open_pool
from dockyard.collect.quality import (
    Fault,
    QualityReport,
    TaskReport,
    judge_duplicates,
    judge_nop,
    judge_oracle,
    judge_policy,
)
from dockyard.collect.run_order import PreparedRollouts, RolloutProgress, gather
from dockyard.config import AgentConfig, GatewayConfig, RunConfig
from dockyard.errors import DockyardError
from dockyard.rollout.order import Attempt, Order
from dockyard.rollout.pool import Runner
from dockyard.rollout.trial import TrialRunner
from dockyard.run_dir.durable import disk_errors, whole_folder, write_atomically
from dockyard.run_dir.run import EVAL, ROLLOUTS, RunDir
from dockyard.tasks.duplicates import content_digest
from dockyard.tasks.folder import survey_tasks, task_settings
from dockyard.types import Group, Rollout, Task

# pyright: reportMissingTypeStubs=false


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Every task of a folder."""

    folder: Path
    tasks: list[Task]
    """That can be run."""
    reports: dict[str, TaskReport]
    """Of all, by name."""
    digest: str
    """Of all that can be read."""


def find_candidates(folder: Path) -> Candidates:
    """Broken folders and tasks without a solution are named, and the rest can be run."""
    found = survey_tasks(folder)
    reports = {
        item.path.name: TaskReport(task=item.path.name, path=str(item.path)).blamed(
            Fault.BROKEN, "; ".join(item.problems)
        )
        for item in found.broken
    }
    reports |= {task.name: _first_look(task) for task in found.tasks}
    return Candidates(
        folder=folder,
        tasks=[task for task in found.tasks if reports[task.name].ok],
        reports=reports,
        digest=content_digest(found.tasks),
    )


def _first_look(task: Task) -> TaskReport:
    report = TaskReport(task=task.name, path=str(task.path))
    try:
        as_harbor = HarborTask(task.path)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        return report.blamed(Fault.BROKEN, f"`{where}` in `{task.path / 'task.toml'}`: {first['msg']}")
    except (OSError, ValueError, RuntimeError) as error:  # what Harbor itself takes for a task it cannot run
        return report.blamed(Fault.BROKEN, str(error))
    return _second_look(task, as_harbor, report)


def _second_look(task: Task, as_harbor: HarborTask, report: TaskReport) -> TaskReport:
    full: Any = task_settings(task.path).get("metadata", {}).get("max_reward", 1.0)
    if not isinstance(full, int | float) or not math.isfinite(full) or full <= 0:
        where = f"`metadata.max_reward` in `{task.path / 'task.toml'}`"
        return report.blamed(Fault.BROKEN, f"{where} is `{full}`, not a number above 0")
    empty = [path for path in _instructions(as_harbor) if not path.read_text(errors="replace").strip()]
    if empty:
        return report.blamed(Fault.BROKEN, f"`{empty[0]}` is empty")
    report = TaskReport(task=task.name, path=str(task.path), full_reward=float(full))
    missing = _missing_solution(as_harbor)
    return report.blamed(Fault.NO_SOLUTION, f"`{missing}` does not exist") if missing else report


def _instructions(task: HarborTask) -> list[Path]:
    steps = [task.paths.step_instruction_path(step.name) for step in task.config.steps or []]
    return steps or [task.paths.instruction_path]


def _missing_solution(task: HarborTask) -> Path | None:
    """Where `oracle` would look in vain. A step without a solution of its own uses the task's."""
    system, paths = task.config.environment.os, task.paths
    steps = [step.name for step in task.config.steps or []]
    own = [step for step in steps if paths.step_solution_dir(step).exists()]
    for step in own:
        if paths.discovered_step_solve_path_for(step, system) is None:
            return paths.step_solve_path_for(step, system)
    shared = paths.discovered_solve_path_for(system)
    needed = len(own) < len(steps) or not steps
    return paths.solve_path_for(system) if needed and shared is None else None


_AGENTS = ("oracle", "nop")
"""By attempt."""


def prepare_check(config: RunConfig, *, difficulty: int | None) -> PreparedRollouts | None:
    """Refuse what cannot run, before the run's folder is made. None where no policy takes part."""
    check_run(_for_judges(config))
    if not difficulty:
        return None
    check_run(config)
    return PreparedRollouts(model=find_model_files(config))


def check_tasks(
    run: RunDir, candidates: Candidates, prepared: PreparedRollouts | None, *, difficulty: int | None
) -> QualityReport:
    """Run what is not recorded yet, and leave the report in the run's folder."""
    reports = process.run(_check(run, candidates, prepared, difficulty or 0))
    report = QualityReport.of(
        list(reports.values()),
        folder=candidates.folder,
        rollouts=run.paths.rollouts_of(ROLLOUTS),
        trials=run.paths.trials,
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
    run: RunDir, candidates: Candidates, prepared: PreparedRollouts | None, difficulty: int
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
    retry_lost = not run.paths.rollouts_of(EVAL).exists()
    order = _order(run, ROLLOUTS, candidates.tasks, len(_AGENTS), retry_lost=retry_lost)
    groups = await _run_judges(run, order) if order.tasks else ()
    trials = [run.paths.trials / attempt.name for attempt in order.attempts()]
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
    with RolloutProgress("oracle and nop", len(order.tasks) * order.group_size) as progress:
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
