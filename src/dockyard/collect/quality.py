"""The rules by which a task is fit for training, and the report of a check.

A task is good if its own solution (`oracle`) earns the full reward and doing nothing (`nop`) does not. The full reward
is 1, or `[metadata] max_reward` of its task.toml. Among duplicates the first good task is kept. If a policy attempted
the good tasks, those that it always or never solved are not good: it learns nothing from them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Self

from dockyard.collect.progress import aligned
from dockyard.tasks.duplicates import find_duplicates
from dockyard.types import Rollout, Task

_EXACT = "the same instruction, tests and environment"
_NEAR = "the same words in the instruction, and the same environment or solution"
_SHOWN = 40
_CLOSE = 1e-9  # the mean of a task's steps may be below 1 by a rounding error


class Fault(StrEnum):
    """Why a task is not good."""

    BROKEN = "broken"
    NO_SOLUTION = "no_solution"
    ORACLE_FAILED = "oracle_failed"
    ORACLE_LOST = "oracle_lost"
    NOP_REWARDED = "nop_rewarded"
    NOP_LOST = "nop_lost"
    DUPLICATE = "duplicate"
    ALWAYS_SOLVED = "always_solved"
    NEVER_SOLVED = "never_solved"
    POLICY_LOST = "policy_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskProblem:
    """A reason why a task is not good."""

    why: Fault
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """The results of a policy's rollouts of one task."""

    rollouts: int
    solved: int
    lost: int
    reward: float | None
    """The mean reward; None if all rollouts were lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """The result of checking one task."""

    task: str
    path: str
    ok: bool = True
    problems: tuple[TaskProblem, ...] = ()
    full_reward: float = 1.0
    oracle: float | None = None
    """Its reward; None if it was not run, or lost."""
    nop: float | None = None
    """Its reward; None if it was not run, or lost."""
    policy: Attempts | None = None

    def blamed(self, why: Fault, detail: str) -> Self:
        """Return the report with another problem."""
        return replace(self, ok=False, problems=(*self.problems, TaskProblem(why=why, detail=detail)))

    def is_full(self, reward: float) -> bool:
        return reward >= self.full_reward - _CLOSE


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityReport:
    """The result of checking all tasks of a folder."""

    folder: str
    tasks: int
    good: int
    problems: dict[str, int]
    """The number of tasks with each kind of problem."""
    reports: tuple[TaskReport, ...]
    rollouts: str
    trials: str

    @classmethod
    def of(cls, reports: Sequence[TaskReport], *, folder: Path, rollouts: Path, trials: Path) -> Self:
        return cls(
            folder=str(folder),
            tasks=len(reports),
            good=sum(report.ok for report in reports),
            problems=dict(Counter(str(problem.why) for report in reports for problem in report.problems)),
            reports=tuple(sorted(reports, key=lambda report: report.task)),
            rollouts=str(rollouts),
            trials=str(trials),
        )

    def table(self) -> str:
        """Format the tasks that are not good, with the reasons, for the terminal."""
        bad = [report for report in self.reports if not report.ok]
        rows = [(report.task, problem.why, problem.detail) for report in bad[:_SHOWN] for problem in report.problems]
        more = [f"and {len(bad) - _SHOWN} more, which the report names"] if len(bad) > _SHOWN else []
        counts = ", ".join(f"{why} {count}" for why, count in sorted(self.problems.items()))
        totals = f"{self.good} of {self.tasks} tasks in {self.folder} are good" + (f"; {counts}" if counts else "")
        return "\n".join([*aligned(rows), *more, totals, f"rollouts: {self.rollouts}"])


def judge_oracle(report: TaskReport, rollout: Rollout, trial: Path) -> TaskReport:
    """Check that the task's own solution earned the full reward."""
    report = replace(report, oracle=rollout.reward)
    if rollout.reward is None:
        return report.blamed(Fault.ORACLE_LOST, _lost(rollout, trial))
    if not report.is_full(rollout.reward):
        found = f"the solution earned {rollout.reward:g} of {report.full_reward:g}, see `{trial}`"
        return report.blamed(Fault.ORACLE_FAILED, found)
    return report


def judge_nop(report: TaskReport, rollout: Rollout, trial: Path) -> TaskReport:
    """Check that doing nothing did not earn the full reward."""
    report = replace(report, nop=rollout.reward)
    if rollout.reward is None:
        return report.blamed(Fault.NOP_LOST, _lost(rollout, trial))
    if report.is_full(rollout.reward):
        found = f"doing nothing earned {rollout.reward:g} of {report.full_reward:g}, see `{trial}`"
        return report.blamed(Fault.NOP_REWARDED, found)
    return report


def judge_policy(report: TaskReport, rollouts: Sequence[Rollout]) -> TaskReport:
    """Check that the policy solved the task sometimes, but not always. Lost rollouts are not counted."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    solved = sum(report.is_full(reward) for reward in rewards)
    lost = len(rollouts) - len(rewards)
    mean = fmean(rewards) if rewards else None
    report = replace(report, policy=Attempts(rollouts=len(rollouts), solved=solved, lost=lost, reward=mean))
    found = f"{solved} of {len(rewards)} rollouts" + (f", {lost} lost" if lost else "")
    if not rewards:
        causes = Counter(rollout.failure.cause for rollout in rollouts if rollout.failure)
        named = ", ".join(f"{cause} {count}" for cause, count in causes.items())
        return report.blamed(Fault.POLICY_LOST, f"all {lost} rollouts: {named}")
    if solved == len(rewards):
        return report.blamed(Fault.ALWAYS_SOLVED, found)
    return report if solved else report.blamed(Fault.NEVER_SOLVED, found)


def judge_duplicates(reports: dict[str, TaskReport], tasks: Sequence[Task]) -> dict[str, TaskReport]:
    """Mark the good tasks that are duplicates of an earlier good task."""
    good = [task for task in tasks if reports[task.name].ok]
    found = dict(reports)
    for item in find_duplicates(good):
        how = _EXACT if item.exact else _NEAR
        found[item.task] = found[item.task].blamed(Fault.DUPLICATE, f"of `{item.of}` ({how})")
    return found


def _lost(rollout: Rollout, trial: Path) -> str:
    """Return the cause and the first and last line of its message: a build prints its error last."""
    failure = rollout.failure
    lines = [line.strip() for line in failure.message.splitlines() if line.strip()] if failure else []
    said = " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
    return f"{failure.cause if failure else 'unknown'}: {said}, see `{trial}`"
