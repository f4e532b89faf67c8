"""Show the worst rollout of each step, log evaluations as JSON, and stop when held-out tasks are solved.

dockyard train run.toml --callbacks '["hooks:Hooks"]'     # in this folder
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from dockyard import Rollout, StopRun


class Hooks:
    """Keeps the rollouts of a step until the step is recorded."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []

    def after_rollout(self, rollout: Rollout) -> None:
        if rollout.reward is not None:  # None: lost to an infrastructure failure
            self.rollouts.append(rollout)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        worst = min(self.rollouts, key=lambda rollout: rollout.reward or 0.0, default=None)
        if worst:
            cause = worst.failure.cause if worst.failure else "no failure"
            text = f"step {step}: worst rollout {worst.task} #{worst.attempt}, reward {worst.reward}, {cause}"
            print(text, file=sys.stderr)  # stdout is for data
        self.rollouts.clear()

    def after_evaluation(self, version: int, scores: Mapping[str, float]) -> None:
        with Path("evaluations.jsonl").open("a") as file:
            file.write(json.dumps({"version": version, **scores}) + "\n")
        if scores["reward"] >= 0.99:
            raise StopRun(f"the held-out reward of version {version} is {scores['reward']:.2f}")
