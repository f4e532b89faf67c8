"""Draw a finished run: training reward by step, and held-out rewards before and after training.

    python bench/learning_curve.py runs/multi_turn --output docs/images/multi_turn.svg

Held-out points have the exact 95 % intervals over tasks of `dockyard eval`. Prints one table.
"""

import argparse
from pathlib import Path
from typing import Any

from dockyard.collect.passk import Score, score_rollouts
from dockyard.errors import DockyardError
from dockyard.run_dir.run import EVAL_AFTER, EVAL_BEFORE, RunDir


def heldout(run: RunDir, phase: str) -> dict[str, Score]:
    """Return the mean reward of held-out rollouts: of all tasks, then of each kind."""
    rollouts = [item.rollout for item in run.read_rollouts(phase)]
    kinds = {"all": None} | {kind: kind for kind in sorted({rollout.kind for rollout in rollouts})}
    scores = {name: score_rollouts(rollouts, kind) for name, kind in kinds.items()}
    return {name: found.reward for name, found in scores.items() if found}


def draw(rewards: list[float], before: Score, after: Score, file: Path) -> None:
    """Draw one figure on a light background. The same run gives the same bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "dockyard", "svg.fonttype": "none", "font.size": 11})
    figure, axes = plt.subplots(figsize=(7.2, 4.2), facecolor="white")
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, "o-", color="#1f5fa8", markersize=4, linewidth=1.5, label="training rollouts of a step")
    for score, place, colour, name in (
        (before, 0, "#c2571a", "before"),
        (after, len(rewards) + 1, "#2a7d3f", "after"),
    ):
        label = f"{score.num_tasks} held-out tasks {name}: {score.mean:.2f} [{score.low:.2f}, {score.high:.2f}]"
        error = [[score.mean - score.low], [score.high - score.mean]]
        axes.errorbar([place], [score.mean], yerr=error, fmt="s", color=colour, capsize=5, label=label)
    _dress(axes)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)


def _dress(axes: Any) -> None:
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("mean reward")
    axes.set_ylim(-0.02, 1.02)
    axes.grid(visible=True, axis="y", color="#e5e5e5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best", fontsize=9)


def table(before: dict[str, Score], after: dict[str, Score]) -> str:
    """Return a row for all tasks, then one per kind."""
    lines = ["| held-out tasks | | before | after | gain |", "|---|---|---|---|---|"]
    for name, first in before.items():
        if last := after.get(name):
            lines.append(
                f"| {name} | {first.num_tasks} | {_cell(first)} | {_cell(last)} | {last.mean - first.mean:+.2f} |"
            )
    return "\n".join(lines)


def _cell(score: Score) -> str:
    return f"{score.mean:.3f} [{score.low:.3f}, {score.high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--output", metavar="FILE", type=Path, required=True, help="an .svg or .png file")
    arguments = parser.parse_args()
    try:
        run = RunDir.join(arguments.run_dir)
        before, after = heldout(run, EVAL_BEFORE), heldout(run, EVAL_AFTER)
        rewards = [reward for line in run.read_metrics() if (reward := line.get("reward/mean")) is not None]
        if "all" not in before or "all" not in after or not rewards:
            hint = f"`dockyard train --resume {arguments.run_dir}` finishes it"
            raise DockyardError(f"`{arguments.run_dir}` has no held-out rollouts before and after training", hint=hint)
    except DockyardError as error:
        parser.exit(1, f"error: {error.message}\nhint: {error.hint}\n")
    draw(rewards, before["all"], after["all"], arguments.output)
    print(table(before, after))


if __name__ == "__main__":
    main()
