"""What a run came to: held-out rewards with error bars, the reward curve, an example before and after."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from dockyard.collect.evaluate import aligned
from dockyard.collect.passk import score_rollouts
from dockyard.rl.statistics import gateway_line, gateway_metrics
from dockyard.rollout.pool import failure_counts
from dockyard.run_dir.run import EVAL_AFTER, EVAL_BEFORE, RunDir, eval_phase, step_phase
from dockyard.types import Rollout

_BARS = " ▁▂▃▄▅▆▇█"
_CHART_ROWS = 6
_EXAMPLE_LINES = 3


def summarise(run: RunDir, wall_s: float) -> dict[str, Any]:
    """The run's summary from its records, written to its folder."""
    trained = [rollout for step in range(run.config.steps) for rollout in _rollouts(run, step_phase(step))]
    metrics = run.read_metrics()
    during = {int(line["step"] or 0) + 1: line["reward/heldout"] for line in metrics if "reward/heldout" in line}
    evaluations = (EVAL_BEFORE, *map(eval_phase, during), EVAL_AFTER)
    everything = [*trained, *(rollout for phase in evaluations for rollout in _rollouts(run, phase))]
    before = _rollouts(run, EVAL_BEFORE)
    summary = {
        **_heldout("eval_before", before),
        **_heldout("eval_after", _rollouts(run, EVAL_AFTER)),
        "eval_during": during,
        "eval_tasks": len({rollout.task for rollout in before}),
        "steps": run.config.steps,
        "seed": run.config.seed,
        "method": run.config.trainer.method,
        "rewards": [line.get("reward/mean") for line in metrics],
        "rollouts": len(everything),
        "sampled_tokens": sum(rollout.num_sampled for rollout in everything),
        "failures": failure_counts(everything),
        "gateway": gateway_metrics(everything),
        "wall_s": wall_s,
    }
    run.write_summary(summary)
    return summary


def _rollouts(run: RunDir, phase: str) -> list[Rollout]:
    return [item.rollout for item in run.read_rollouts(phase)]


def _heldout(name: str, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The mean over tasks with its interval, as `dockyard eval` has it, and the mean of each kind."""
    found = score_rollouts(rollouts)
    kinds = {kind: score_rollouts(rollouts, kind) for kind in sorted({rollout.kind for rollout in rollouts})}
    return {
        name: found and found.reward.mean,
        f"{name}_low": found and found.reward.low,
        f"{name}_high": found and found.reward.high,
        f"{name}_kinds": found and {kind: scores.reward.mean for kind, scores in kinds.items() if scores},
    }


def report(run: RunDir, summary: dict[str, Any]) -> str:
    """The closing text for the terminal."""
    parts = [chart([reward for reward in summary["rewards"] if reward is not None])]
    if summary["eval_before"] is not None and summary["eval_after"] is not None:
        parts += [_evaluation(summary), _example(run)]
    parts.append(_closing(run, summary))
    return "\n\n".join(part for part in parts if part)


def _evaluation(summary: dict[str, Any]) -> str:
    before, after = summary["eval_before_kinds"], summary["eval_after_kinds"]
    kinds = sorted(before) if len(before) > 1 else []
    both = (
        f"{summary[name]:.2f} [{summary[f'{name}_low']:.2f}, {summary[f'{name}_high']:.2f}]"
        for name in ("eval_before", "eval_after")
    )
    rows = [
        ["", "before", "after"],
        *([kind or "(none)", f"{before[kind]:.2f}", f"{after.get(kind, float('nan')):.2f}"] for kind in kinds),
        ["all", *both],
    ]
    return "\n".join([f"held-out reward, {summary['eval_tasks']} tasks, with a 95 % interval", *aligned(rows)])


def _example(run: RunDir) -> str:
    """The held-out task that gained most: the end of what both transcripts have in common, then where they differ."""
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


def _closing(run: RunDir, summary: dict[str, Any]) -> str:
    failures = ", ".join(f"{cause} {count}" for cause, count in summary["failures"].items()) or "none"
    last = run.paths.adapter(summary["steps"])
    kind = "model" if run.config.trainer.method == "full" else "adapter"
    return "\n".join(
        [
            f"{summary['rollouts']} rollouts, failures: {failures}; {summary['wall_s'] / 60:.1f} minutes",
            *filter(None, [gateway_line(summary["gateway"])]),
            f"run folder:   {run.path}",
            f"{kind + ':':<14}{last}",
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


def chart(rewards: Sequence[float], num_steps: int = 0) -> str:
    """The reward of each step as bars of text, with room for `num_steps` of them."""
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


def draw_curve(summary: dict[str, Any], path: Path) -> None:
    """The reward curve as a picture."""
    rewards = [reward for reward in summary["rewards"] if reward is not None]
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot, whose backend is the notebook's

    figure = Figure(figsize=(6, 4), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o", label="training rollouts")
    if summary["eval_during"]:
        axes.plot(*zip(*summary["eval_during"].items(), strict=True), "s--", label="held-out, during")
    for name, x in (("before", 0), ("after", len(rewards) + 1)):
        if summary[f"eval_{name}"] is not None:
            mean, low, high = (summary[f"eval_{name}{end}"] for end in ("", "_low", "_high"))
            error = [[mean - low], [high - mean]]
            axes.errorbar([x], [mean], yerr=error, fmt="s", capsize=4, label=f"held-out, {name}")
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.set_ylim(bottom=min(0.0, *rewards) if rewards else 0.0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
