"""One training run, from its settings to its summary."""

import sys
import time
from contextlib import closing
from pathlib import Path

from dockyard import process
from dockyard.callbacks import load_callbacks, log_stop
from dockyard.collect.task_sets import check_tasks, task_sets
from dockyard.config import RunConfig
from dockyard.engine.model_dir import find_model
from dockyard.errors import StopRun
from dockyard.gateway.render.renderer import Renderer
from dockyard.rl.functions import check_functions
from dockyard.run_dir.run import RunDir
from dockyard.tasks.order import load_order, with_steps
from dockyard.trainer.display import TrainingProgress, Words
from dockyard.trainer.heldout import Heldout
from dockyard.trainer.loop import train
from dockyard.trainer.modes import OpenLearner, RunInputs, check_method, choose_mode, makes_rollouts
from dockyard.trainer.record import StepRecord
from dockyard.trainer.recorded import load_groups
from dockyard.trainer.report import RunSummary, draw_curve, report
from dockyard.trainer.trackers import Trackers, check_trackers, open_trackers


def run_training(config: RunConfig, *, run_dir: RunDir, open_remote: OpenLearner | None = None) -> None:
    """Train, evaluate before and after, and write a summary. Check what can be checked before the first rollout.

    A run folder that has records is resumed. `open_remote` opens a learner on another machine.
    """
    start = time.monotonic()
    inputs = _prepare(config, run_dir, remote=open_remote is not None)
    config = run_dir.config = with_steps(config, len(inputs.recorded or inputs.tasks.train))
    with open_trackers(config, run_dir) as trackers:
        words = Words.of([*inputs.tasks.train, *inputs.tasks.heldout], inputs.renderer.text)
        stopped: StopRun | None = None
        with closing(inputs.callbacks), TrainingProgress(config.steps, words=words) as progress:
            try:
                process.run(_run(inputs, progress, trackers, open_remote))
            except StopRun as stop:
                stopped = stop
        summary = RunSummary.of(run_dir, wall_s=time.monotonic() - start)
        run_dir.write_summary(summary.json())
        trackers.conclude(summary.json())
    draw_curve(summary, run_dir.paths.curve)
    sys.stderr.write(f"\n{report(run_dir, summary)}\n")
    if stopped:
        log_stop(stopped, "train", run_dir.path)


def _prepare(config: RunConfig, run: RunDir, *, remote: bool) -> RunInputs:
    check_trackers(config.tracker)
    check_method(config, remote=remote)
    check_tasks(config)
    if config.tasks.order:
        load_order(config.tasks.order)
    check_functions(config.grpo, remote=remote)
    steps = [int(line["step"] or 0) for line in run.read_metrics()]
    callbacks = load_callbacks(config.callbacks, last_recorded=max(steps, default=-1))
    if makes_rollouts(config):
        from dockyard.collect.open import check_run  # imports Harbor

        check_run(config)
    model_dir = find_model(config.model.name, weights=not remote)
    renderer = Renderer.load(model_dir, config.model.name)
    recorded = config.tasks.source == "recorded"
    return RunInputs(
        run=run,
        tasks=task_sets(run),
        recorded=load_groups(Path(config.tasks.dataset or ""), renderer, config.grpo) if recorded else (),
        model_dir=model_dir,
        renderer=renderer,
        callbacks=callbacks,
    )


async def _run(
    inputs: RunInputs, progress: TrainingProgress, trackers: Trackers, open_remote: OpenLearner | None
) -> None:
    run, config, callbacks = inputs.run, inputs.run.config, inputs.callbacks
    mode = await choose_mode(config, open_remote)
    async with mode.open(inputs, progress) as parts:
        learner = parts.learner
        heldout = Heldout(
            tasks=inputs.tasks.heldout,
            attempts=parts.attempts,
            learner=learner,
            run=run,
            config=config,
            callbacks=callbacks,
        )
        await learner.publish()
        await heldout.before()
        callbacks.start(learner.version)
        record = StepRecord(run, progress, learner, heldout.during, trackers.log, parts.off_policy_source, callbacks)
        await train(config.steps, parts.rollouts, learner, record)
        await heldout.after()
