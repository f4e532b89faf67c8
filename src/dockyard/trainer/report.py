"""The results of a run: held-out rewards with intervals, the reward curve, an example before and after training."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import nan
from pathlib import Path
from typing import Self

from dockyard.collect.passk import Score, score_rollouts
from dockyard.collect.progress import aligned
from dockyard.rl.statistics import gateway_line, gateway_metrics
from dockyard.rollout.blame import failure_counts
from dockyard.run_dir.run import EVAL_AFTER, EVAL_BEFORE, RunDir, eval_phase, step_phase
from dockyard.types import Json, Rollout

_BARS = " ▁▂▃▄▅▆▇█"
_CHART_ROWS = 6
_EXAMPLE_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutSummary:
    """The held-out reward of one version."""

    reward: Score
    """The mean over tasks with its confidence interval, as `dockyard eval` computes it."""
    kinds: dict[str, float]
    """The mean reward of each kind of task."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Self | None:
        """None if no rollout has a reward."""
        found = score_rollouts(rollouts)
        if found is None:
            return None
        kinds = {kind: score_rollouts(rollouts, kind) for kind in sorted({rollout.kind for rollout in rollouts})}
        return cls(reward=found.reward, kinds={kind: scores.reward.mean for kind, scores in kinds.items() if scores})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The results of a run, as its folder records them."""

    before: HeldoutSummary | None
    after: HeldoutSummary | None
    during: dict[int, float | None]
    """The held-out reward of the versions that were evaluated during training."""
    num_eval_tasks: int
    steps: int
    seed: int
    method: str
    rewards: list[float | None]
    """The mean training reward of each step."""
    num_rollouts: int
    num_sampled_tokens: int
    failures: dict[str, int]
    """Failed rollouts by cause."""
    gateway: dict[str, float]
    wall_s: float

    @classmethod
    def of(cls, run: RunDir, wall_s: float) -> Self:
        """Summarize the run's records."""
        trained = [rollout for step in range(run.config.steps) for rollout in _rollouts(run, step_phase(step))]
        metrics = run.read_metrics()
        during = {int(line["step"] or 0) + 1: line["reward/heldout"] for line in metrics if "reward/heldout" in line}
        evaluations = (EVAL_BEFORE, *map(eval_phase, during), EVAL_AFTER)
        everything = [*trained, *(rollout for phase in evaluations for rollout in _rollouts(run, phase))]
        before = _rollouts(run, EVAL_BEFORE)
        return cls(
            before=HeldoutSummary.of(before),
            after=HeldoutSummary.of(_rollouts(run, EVAL_AFTER)),
            during=during,
            num_eval_tasks=len({rollout.task for rollout in before}),
            steps=run.config.steps,
            seed=run.config.seed,
            method=run.config.trainer.method,
            rewards=[line.get("reward/mean") for line in metrics],
            num_rollouts=len(everything),
            num_sampled_tokens=sum(rollout.num_sampled for rollout in everything),
            failures=failure_counts(everything),
            gateway=gateway_metrics(everything),
            wall_s=wall_s,
        )

    @property
    def known_rewards(self) -> list[float]:
        """The training rewards of the steps that have one."""
        return [reward for reward in self.rewards if reward is not None]

    def json(self) -> Json:
        """The summary as it is written to the run's folder and sent to trackers."""
        return {
            **_heldout_json("eval_before", self.before),
            **_heldout_json("eval_after", self.after),
            "eval_during": self.during,
            "eval_tasks": self.num_eval_tasks,
            "steps": self.steps,
            "seed": self.seed,
            "method": self.method,
            "rewards": self.rewards,
            "rollouts": self.num_rollouts,
            "sampled_tokens": self.num_sampled_tokens,
            "failures": self.failures,
            "gateway": self.gateway,
            "wall_s": self.wall_s,
        }


def _rollouts(run: RunDir, phase: str) -> list[Rollout]:
    return [item.rollout for item in run.read_rollouts(phase)]


def _heldout_json(name: str, found: HeldoutSummary | None) -> Json:
    return {
        name: found and found.reward.mean,
        f"{name}_low": found and found.reward.low,
        f"{name}_high": found and found.reward.high,
        f"{name}_kinds": found and found.kinds,
    }


def report(run: RunDir, summary: RunSummary) -> str:
    """The closing text for the terminal."""
    parts = [chart(summary.known_rewards)]
    if summary.before and summary.after:
        parts += [_evaluation(summary.before, summary.after, summary.num_eval_tasks), _example(run)]
    parts.append(_closing(run, summary))
    return "\n\n".join(part for part in parts if part)


def _evaluation(before: HeldoutSummary, after: HeldoutSummary, num_tasks: int) -> str:
    kinds = sorted(before.kinds) if len(before.kinds) > 1 else []
    rows = [
        ["", "before", "after"],
        *([kind or "(none)", *(f"{found.kinds.get(kind, nan):.2f}" for found in (before, after))] for kind in kinds),
        ["all", *(_interval(found.reward) for found in (before, after))],
    ]
    return "\n".join([f"held-out reward, {num_tasks} tasks, with a 95 % interval", *aligned(rows)])


def _interval(score: Score) -> str:
    return f"{score.mean:.2f} [{score.low:.2f}, {score.high:.2f}]"


def _example(run: RunDir) -> str:
    """The held-out task whose reward rose most: the end of what both transcripts share, then where they differ."""
    before = {item.rollout.task: item for item in run.read_rollouts(EVAL_BEFORE)}
    after = {item.rollout.task: item for item in run.read_rollouts(EVAL_AFTER)}
    gains = {
        task: (item.rollout.reward or 0.0) - (before[task].rollout.reward or 0.0)
        for task, item in after.items()
        if task in before
    }
    if not gains:
        return ""
    task = max(gains, key=lambda name: gains[name])
    both = {"before": before[task], "after": after[task]}
    lines = [item.transcript.splitlines() for item in both.values()]
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*lines, strict=False)))
    shown = [f"example: {task}", *lines[0][max(alike - _EXAMPLE_LINES, 0) : alike]]
    for (name, item), said in zip(both.items(), lines, strict=True):
        shown += [f"--- {name} training, reward {item.rollout.reward}", *said[alike:]]
    return "\n".join(shown)


def _closing(run: RunDir, summary: RunSummary) -> str:
    failures = ", ".join(f"{cause} {count}" for cause, count in summary.failures.items()) or "none"
    kind = "model" if run.config.trainer.method == "full" else "adapter"
    done = len(summary.rewards)
    return "\n".join(
        [
            *([f"stopped after {done} of {summary.steps} steps"] if done < summary.steps else []),
            f"{summary.num_rollouts} rollouts, failures: {failures}; {summary.wall_s / 60:.1f} minutes",
            *filter(None, [gateway_line(summary.gateway)]),
            f"run folder:   {run.path}",
            f"{kind + ':':<14}{_newest_weights(run, done) or 'none, because no update was made'}",
            f"reward curve: {run.paths.curve}",
            "",
            "next:",
            f"  dockyard export {run.path} --output DIR",
            "  dockyard doctor                                  what this machine can run",
            "  dockyard train --help                            every setting",
            "  dockyard tasks demo DIR                          the demo's tasks as folders, to look at or change",
            "  dockyard train --tasks.train DIR --model.name M  your own tasks, your own model",
        ]
    )


def _newest_weights(run: RunDir, num_updates: int) -> Path | None:
    """The folder of the newest trained weights of a run that made this many updates."""
    folders = [run.paths.adapter(version) for version in range(num_updates, 0, -1)]
    return next((folder for folder in folders if folder.is_dir()), None)


def chart(rewards: Sequence[float], num_steps: int = 0) -> str:
    """The reward of each step as a bar chart in text, with room for `num_steps` bars."""
    if not rewards:
        return ""
    top = max(1.0, *rewards)
    rows: list[str] = []
    for row in reversed(range(_CHART_ROWS)):
        heights = [min(max(reward / top * _CHART_ROWS - row, 0.0), 1.0) for reward in rewards]
        bars = "".join(_BARS[round(height * (len(_BARS) - 1))] * 3 for height in heights)
        label = f"{top * (row + 1) / _CHART_ROWS:4.2f}"
        rows.append(f"{label} │{bars}")
    return "\n".join(["training reward by step", *rows, "     └" + "───" * max(len(rewards), num_steps)])


def draw_curve(summary: RunSummary, path: Path) -> None:
    """Draw the reward curve to a PNG file."""
    from matplotlib.figure import Figure  # pyplot would keep every figure, and choose a backend for the process

    rewards = summary.known_rewards
    figure = Figure(figsize=(6, 4), dpi=150)
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o", label="training rollouts")
    if summary.during:
        axes.plot(*zip(*summary.during.items(), strict=True), "s--", label="held-out, during")
    for name, found, x in (("before", summary.before, 0), ("after", summary.after, len(rewards) + 1)):
        if found:
            mean, low, high = found.reward.mean, found.reward.low, found.reward.high
            error = [[mean - low], [high - mean]]
            axes.errorbar([x], [mean], yerr=error, fmt="s", capsize=4, label=f"held-out, {name}")
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.set_ylim(bottom=min(0.0, *rewards) if rewards else 0.0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
