"""`dockyard rollout`: one pass over the training tasks, recorded in a run folder, and its summary."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Self

from dockyard import process
from dockyard.collect.run_plan import PreparedRollouts, gather, plan_of, rollouts_in, tasks_of
from dockyard.rollout.blame import causes_text, failure_counts
from dockyard.run_dir.run import ROLLOUTS, RunDir
from dockyard.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """Statistics of a set of rollouts."""

    tasks: int
    rollouts: int
    reward: float | None
    """The mean reward, or None if all rollouts were lost."""
    kinds: dict[str, float]
    """The mean reward per kind of task."""
    lost: int
    """Number of rollouts without a reward, lost to infrastructure failures."""
    failures: dict[str, int]
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    wall_s: float
    data: str
    trials: str

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], *, data: Path, trials: Path, wall_s: float) -> Self:
        by_kind: dict[str, list[float]] = {}
        for rollout in rollouts:
            if rollout.reward is not None:
                by_kind.setdefault(rollout.kind, []).append(rollout.reward)
        rewards = [reward for members in by_kind.values() for reward in members]
        return cls(
            tasks=len({rollout.task for rollout in rollouts}),
            rollouts=len(rollouts),
            reward=fmean(rewards) if rewards else None,
            kinds={kind: fmean(members) for kind, members in sorted(by_kind.items())},
            lost=len(rollouts) - len(rewards),
            failures=failure_counts(rollouts),
            calls=sum(rollout.stats.get("calls", 0) for rollout in rollouts),
            prompt_tokens=sum(rollout.stats.get("prompt_tokens", 0) for rollout in rollouts),
            sampled_tokens=sum(rollout.stats.get("sampled_tokens", 0) for rollout in rollouts),
            wall_s=wall_s,
            data=str(data),
            trials=str(trials),
        )

    def table(self) -> str:
        """Format the summary for the terminal."""
        rows = {
            "tasks": f"{self.tasks}, {self.rollouts} rollouts in {self.wall_s:.0f} s",
            "mean reward": "-" if self.reward is None else f"{self.reward:.3f}",
            **({f"  {kind}": f"{mean:.3f}" for kind, mean in self.kinds.items()} if len(self.kinds) > 1 else {}),
            "failures": causes_text(self.failures) + (f"; {self.lost} rollouts lost" if self.lost else ""),
            "tokens": f"{self.sampled_tokens:,} sampled, {self.prompt_tokens:,} in prompts, {self.calls:,} calls",
            "rollouts": self.data,
            "trials": self.trials,
        }
        width = max(14, *(len(name) + 2 for name in rows))
        return "\n".join(f"{name:<{width}}{value}" for name, value in rows.items())


def collect_rollouts(
    run: RunDir, prepared: PreparedRollouts, *, num_tasks: int | None, harbor_cli: bool
) -> RolloutSummary:
    """Attempt the training tasks, or the first `num_tasks`, and write a summary to the run folder."""
    start = time.monotonic()
    tasks = tasks_of(run, "train")[:num_tasks]
    plan = plan_of(run.config, ROLLOUTS, tasks, run.config.grpo.group_size)
    with closing(prepared.callbacks):
        groups = process.run(gather(run, prepared, plan, title="rollouts", harbor_cli=harbor_cli))
    summary = RolloutSummary.of(
        rollouts_in(groups),
        data=run.paths.rollouts_of(ROLLOUTS),
        trials=run.paths.trials,
        wall_s=time.monotonic() - start,
    )
    run.write_summary(asdict(summary))
    return summary
