"""One training run, from its settings to its summary."""

import sys
import time
from pathlib import Path

from dockyard import process
from dockyard.collect.open import check_run
from dockyard.collect.task_sets import task_sets
from dockyard.config import RunConfig
from dockyard.engine.model_dir import find_model
from dockyard.gateway.render.renderer import Renderer
from dockyard.run_dir.run import RunDir
from dockyard.tasks.order import with_steps
from dockyard.trainer.display import TrainingProgress, Words
from dockyard.trainer.heldout import Heldout
from dockyard.trainer.loop import StepRecord, train
from dockyard.trainer.modes import OpenLearner, RunInputs, check_method, open_parts
from dockyard.trainer.recorded import load_groups
from dockyard.trainer.report import draw_curve, report, summarise
from dockyard.trainer.trackers import Trackers, check_trackers, open_trackers


def run_training(config: RunConfig, *, run_dir: RunDir, elsewhere: OpenLearner | None = None) -> None:
    """Train, evaluate before and after, and leave a summary. What can be known to fail fails before the first rollout.

    A run folder with records in it is taken up where it was left. `elsewhere` opens a learner that is not in this
    process.
    """
    start = time.monotonic()
    inputs = _prepare(config, run_dir, weights=elsewhere is None)
    config = run_dir.config = with_steps(config, len(inputs.recorded or inputs.tasks.train))
    with open_trackers(config, run_dir) as trackers:
        words = Words.of([*inputs.tasks.train, *inputs.tasks.heldout], inputs.renderer.text)
        with TrainingProgress(config.steps, words=words) as progress:
            process.run(_run(config, run_dir, inputs, progress, trackers, elsewhere))
        summary = summarise(run_dir, wall_s=time.monotonic() - start)
        trackers.conclude(summary)
    draw_curve(summary, run_dir.paths.curve)
    sys.stderr.write(f"\n{report(run_dir, summary)}\n")


def _prepare(config: RunConfig, run: RunDir, *, weights: bool) -> RunInputs:
    check_trackers(config.tracker)
    recorded = config.tasks.source == "recorded"
    attempting = not recorded or config.tasks.heldout is not None
    check_method(config, elsewhere=not weights, attempting=attempting)
    if attempting:
        check_run(config)
    model_dir = find_model(config.model.name, weights=weights)
    renderer = Renderer.load(model_dir, config.model.name)
    return RunInputs(
        tasks=task_sets(run),
        recorded=load_groups(Path(config.tasks.dataset or ""), renderer, config.grpo) if recorded else (),
        model_dir=model_dir,
        renderer=renderer,
    )


async def _run(
    config: RunConfig,
    run: RunDir,
    inputs: RunInputs,
    progress: TrainingProgress,
    trackers: Trackers,
    elsewhere: OpenLearner | None,
) -> None:
    async with open_parts(config, run, inputs, progress, elsewhere) as parts:
        heldout = Heldout(
            tasks=inputs.tasks.heldout, attempts=parts.attempts, learner=parts.learner, run=run, config=config
        )
        await parts.learner.publish()
        await heldout.before()
        record = StepRecord(run, progress, parts.learner, heldout.during, trackers.log, parts.foreign)
        await train(config.steps, parts.rollouts, parts.learner, record)
        await heldout.after()
