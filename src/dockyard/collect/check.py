"""Check tasks: run the solution and a do-nothing agent on each, then a policy on those that are good.

In the run folder, `rollouts/rollouts.jsonl` has the rewards of the solution (attempt 0) and of doing nothing
(attempt 1), and `rollouts/eval.jsonl` those of the policy.
"""

import math
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harbor.models.task.task import Task as HarborTask
from pydantic import ValidationError
from pydantic_core import to_json

from dockyard import process
from dockyard.collect.open import NoModel, check_run, find_model_files, open_pool
from dockyard.collect.progress import RolloutProgress
from dockyard.collect.quality import (
    Fault,
    QualityReport,
    TaskReport,
    judge_duplicates,
    judge_nop,
    judge_oracle,
    judge_policy,
)
from dockyard.collect.run_plan import PreparedRollouts, gather, plan_of
from dockyard.config import AgentConfig, GatewayConfig, RunConfig
from dockyard.errors import DockyardError
from dockyard.rollout.plan import Attempt, RolloutPlan
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
    """The tasks of a folder."""

    folder: Path
    tasks: list[Task]
    """The tasks that can be run."""
    reports: dict[str, TaskReport]
    """The reports of all tasks, by name."""
    digest: str
    """A digest of the contents of all tasks that can be read."""


def find_candidates(folder: Path) -> Candidates:
    """Find the tasks of a folder, and report broken ones and those without a solution."""
    found = survey_tasks(folder)
    reports = {
        item.path.name: TaskReport(task=item.path.name, path=str(item.path)).blamed(
            Fault.BROKEN, "; ".join(item.problems)
        )
        for item in found.broken
    }
    reports |= {task.name: _inspect(task) for task in found.tasks}
    return Candidates(
        folder=folder,
        tasks=[task for task in found.tasks if reports[task.name].ok],
        reports=reports,
        digest=content_digest(found.tasks),
    )


def _inspect(task: Task) -> TaskReport:
    """Report what is wrong with a task before it is run."""
    report = TaskReport(task=task.name, path=str(task.path))
    try:
        as_harbor = HarborTask(task.path)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        return report.blamed(Fault.BROKEN, f"`{where}` in `{task.path / 'task.toml'}`: {first['msg']}")
    except (OSError, ValueError, RuntimeError) as error:  # Harbor's errors for a task that it cannot run
        return report.blamed(Fault.BROKEN, str(error))
    return _inspect_contents(task, as_harbor, report)


def _inspect_contents(task: Task, as_harbor: HarborTask, report: TaskReport) -> TaskReport:
    full: Any = task_settings(task.path).get("metadata", {}).get("max_reward", 1.0)
    if not isinstance(full, int | float) or not math.isfinite(full) or full <= 0:
        where = f"`metadata.max_reward` in `{task.path / 'task.toml'}`"
        return report.blamed(Fault.BROKEN, f"{where} is `{full}`, not a number above 0")
    empty = [path for path in _instructions(as_harbor) if not path.read_text(errors="replace").strip()]
    if empty:
        return report.blamed(Fault.BROKEN, f"`{empty[0]}` is empty")
    report = replace(report, full_reward=float(full))
    missing = _missing_solution(as_harbor)
    return report.blamed(Fault.NO_SOLUTION, f"`{missing}` does not exist") if missing else report


def _instructions(task: HarborTask) -> list[Path]:
    steps = [task.paths.step_instruction_path(step.name) for step in task.config.steps or []]
    return steps or [task.paths.instruction_path]


def _missing_solution(task: HarborTask) -> Path | None:
    """Return the path of a solution that `oracle` needs and that does not exist, or None.

    A step without its own solution uses the task's.
    """
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
"""The agents by number of the attempt."""


def prepare_check(config: RunConfig, *, difficulty: int | None) -> PreparedRollouts | None:
    """Raise an error if the check cannot run, before the run's folder is made. Return None if no policy is run."""
    check_run(_without_policy(config))
    if not difficulty:
        return None
    check_run(config)
    return PreparedRollouts(model=find_model_files(config))


def check_tasks(
    run: RunDir, candidates: Candidates, prepared: PreparedRollouts | None, *, difficulty: int | None
) -> QualityReport:
    """Run what is not recorded yet, and write the report to the run's folder."""
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
    """Write the report as JSON."""
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, to_json(asdict(report), indent=2, inf_nan_mode="null") + b"\n")


def keep_good(folder: Path, report: QualityReport) -> None:
    """Copy the good tasks to this folder. Tasks that it already has are kept, and nothing is removed."""
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
    reports = judge_duplicates(await _run_judges(run, candidates), candidates.tasks)
    good = [task for task in candidates.tasks if reports[task.name].ok]
    if not prepared or not good:
        return reports
    groups = await gather(run, prepared, plan_of(run.config, EVAL, good, difficulty), title="policy")
    return reports | {group.task: judge_policy(reports[group.task], group.rollouts) for group in groups}


async def _run_judges(run: RunDir, candidates: Candidates) -> dict[str, TaskReport]:
    """Attempt each task with both agents."""
    # Once the policy has records, lost attempts are not repeated: the records are of the tasks that were good then.
    retry_lost = not run.paths.rollouts_of(EVAL).exists()
    plan = plan_of(run.config, ROLLOUTS, candidates.tasks, len(_AGENTS), retry_lost=retry_lost)
    groups = await _judge_attempts(run, plan) if plan.tasks else ()
    trials = [run.paths.trials / attempt.name for attempt in plan.attempts()]
    reports = dict(candidates.reports)
    for index, group in enumerate(groups):
        report, (oracle, nop) = reports[group.task], group.rollouts
        report = judge_oracle(report, oracle, trials[index * len(_AGENTS)])
        reports[group.task] = judge_nop(report, nop, trials[index * len(_AGENTS) + 1])
    return reports


async def _judge_attempts(run: RunDir, plan: RolloutPlan) -> tuple[Group, ...]:
    config = _without_policy(run.config)
    with RolloutProgress("oracle and nop", len(plan.tasks) * plan.group_size) as progress:
        async with open_pool(config, run, NoModel(), None, progress.phases) as pool:
            assert isinstance(pool.runner, TrialRunner)
            judges = _Judges(tuple(replace(pool.runner, agent=AgentConfig(name=name)) for name in _AGENTS))
            return await replace(pool, runner=judges).collect(plan, progress.finished)


def _without_policy(config: RunConfig) -> RunConfig:
    """Return the settings for agents that call no model: the policy's agent and the gateway's settings do not apply."""
    return config.model_copy(update={"agent": AgentConfig(name=_AGENTS[0]), "gateway": GatewayConfig()})


@dataclass(frozen=True, slots=True)
class _Judges:
    """Implements `Runner` with one runner per attempt of a task."""

    runners: tuple[Runner, ...]

    async def run(self, attempt: Attempt) -> Rollout:
        return await self.runners[attempt.index].run(attempt)
