"""`dockyard eval`: attempt held-out tasks several times each, and estimate pass@k and the mean reward."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Self

from dockyard import process
from dockyard.collect.passk import Score, Scores, score_numbers, score_rollouts
from dockyard.collect.progress import aligned
from dockyard.collect.run_plan import PreparedRollouts, gather, plan_of, rollouts_in, tasks_of
from dockyard.rollout.blame import causes_text, failure_counts
from dockyard.run_dir.resume import SplitName
from dockyard.run_dir.run import EVAL, RunDir
from dockyard.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """Scores over all tasks and per kind of task. Lost rollouts are not counted."""

    scores: Scores | None
    """None if every rollout was lost."""
    kinds: dict[str, Scores]
    rollouts: int
    lost: int
    failures: dict[str, int]
    split: SplitName
    adapter: str | None
    data: str

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], *, split: SplitName, adapter: str | None, data: str) -> Self:
        kinds = {kind: score_rollouts(rollouts, kind) for kind in sorted({rollout.kind for rollout in rollouts})}
        return cls(
            scores=score_rollouts(rollouts),
            kinds={kind: scores for kind, scores in kinds.items() if scores},
            rollouts=len(rollouts),
            lost=sum(rollout.reward is None for rollout in rollouts),
            failures=failure_counts(rollouts),
            split=split,
            adapter=adapter,
            data=data,
        )

    def table(self) -> str:
        """Format the report for the terminal."""
        lines = [f"{self.split} tasks: means over tasks, with 95 % confidence intervals"]
        if self.scores:
            lines += _columns(self.scores, self.kinds if len(self.kinds) > 1 else {})
        lost = f", {self.lost} lost" if self.lost else ""
        lines.append(f"{self.rollouts} rollouts{lost}, failures: {causes_text(self.failures)}")
        lines.append(f"rollouts: {self.data}")
        return "\n".join(lines)


def _columns(overall: Scores, kinds: dict[str, Scores]) -> list[str]:
    """Format one line per kind of task and one column per score."""
    rows = [["kind", "tasks", *(f"pass@{k}" for k in overall.passes), "mean reward"]]
    for name, scores in [("all", overall), *kinds.items()]:
        # A kind with lost rollouts may lack the largest k.
        cells = [*(scores.passes.get(k) for k in overall.passes), scores.reward]
        rows.append([name or "(none)", str(scores.reward.num_tasks), *map(_cell, cells)])
    return aligned(rows)


def _cell(score: Score | None) -> str:
    return f"{score.mean:.3f} [{score.low:.3f}, {score.high:.3f}]" if score else "-"


def evaluate(run: RunDir, prepared: PreparedRollouts, *, split: SplitName) -> EvalReport:
    """Attempt the tasks and write the scores to the run folder. Seeds are those of evaluations during training."""
    config = run.config
    tasks, temperature = tasks_of(run, split), config.sampling.eval_temperature
    plan = plan_of(config, EVAL, tasks, config.eval.samples, temperature=temperature)
    with closing(prepared.callbacks) as callbacks:
        groups = process.run(gather(run, prepared, plan, title=f"{split} tasks"))
        adapter = str(prepared.adapter) if prepared.adapter else None
        report = EvalReport.of(rollouts_in(groups), split=split, adapter=adapter, data=str(run.paths.rollouts_of(EVAL)))
        run.write_summary(asdict(report))
        if report.scores:
            callbacks.evaluated(EVAL, 0, score_numbers(report.scores))
            callbacks.report_evaluations()
    return report
