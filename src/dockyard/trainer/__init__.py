"""One training run, from its settings to its summary."""

import logging
import sys
import time
from pathlib import Path

from dockyard import interrupt
from dockyard.collect import check_run
from dockyard.collect.task_sets import task_sets
from dockyard.config import RunConfig
from dockyard.engine.model_dir import find_model
from dockyard.gateway.render import Renderer
from dockyard.rollout.pool import Order
from dockyard.run_dir import EVAL_AFTER, EVAL_BEFORE, RunDir
from dockyard.tasks.order import num_steps
from dockyard.trainer.loop import StepRecord, train
from dockyard.trainer.parts import Inputs, OpenLearner, Parts, open_parts
from dockyard.trainer.progress import Progress
from dockyard.trainer.recorded import load_groups
from dockyard.trainer.report import draw_curve, report, summarise
from dockyard.types import Task

logger = logging.getLogger(__name__)

_TIMID_LR = 1e-5


def run_training(config: RunConfig, *, run_dir: RunDir, elsewhere: OpenLearner | None = None) -> None:
    """Train, evaluate before and after, and leave a summary. What can be known to fail fails before the first rollout.

    A run folder with records in it is taken up where it was left. `elsewhere` opens a learner that is not in this
    process.
    """
    start = time.monotonic()
    inputs = _prepare(config, run_dir, weights=elsewhere is None)
    config = run_dir.config = _with_steps(config, inputs)
    with Progress(config.steps) as progress:
        interrupt.run(_run(config, run_dir, inputs, progress, elsewhere))
    summary = summarise(run_dir, wall_s=time.monotonic() - start)
    draw_curve(summary, run_dir.curve)
    sys.stderr.write(f"\n{report(run_dir, summary)}\n")


def _prepare(config: RunConfig, run: RunDir, *, weights: bool) -> Inputs:
    recorded = config.tasks.source == "recorded"
    if not recorded or config.tasks.heldout:
        check_run(config)
    if 0 < config.trainer.lr < _TIMID_LR:
        logger.warning("`trainer.lr` is %g: below %g a LoRA barely moves", config.trainer.lr, _TIMID_LR)
    model_dir = find_model(config.model.name, weights=weights)
    renderer = Renderer.load(model_dir, config.model.name)
    return Inputs(
        tasks=task_sets(run),
        recorded=load_groups(Path(config.tasks.dataset or ""), renderer) if recorded else (),
        model_dir=model_dir,
        renderer=renderer,
    )


def _with_steps(config: RunConfig, inputs: Inputs) -> RunConfig:
    """Passes as steps."""
    if not config.counts_passes:
        return config
    num_items = len(inputs.recorded or inputs.tasks.train)
    steps = num_steps(num_items, config.grpo.tasks_per_step, config.tasks.passes or 1)
    return config.model_copy(update={"steps": steps})


async def _run(
    config: RunConfig, run: RunDir, inputs: Inputs, progress: Progress, elsewhere: OpenLearner | None
) -> None:
    async with open_parts(config, run, inputs, progress, elsewhere) as parts:
        await parts.learner.publish()
        await _evaluate(config, parts, inputs.tasks.heldout, EVAL_BEFORE)
        record = StepRecord(run, progress, parts.learner, parts.foreign)
        await train(config.steps, parts.rollouts, parts.learner, record)
        await _evaluate(config, parts, inputs.tasks.heldout, EVAL_AFTER)


async def _evaluate(config: RunConfig, parts: Parts, heldout: list[Task], phase: str) -> None:
    """The same tasks, agent and seeds before and after."""
    if not heldout or parts.attempts is None:
        return
    if phase == EVAL_AFTER and parts.learner.engine is None:
        logger.warning("no evaluation after training: `%s` gets no new weights", config.engine.url)
        return
    order = Order(
        phase=phase,
        tasks=heldout,
        group_size=config.eval.samples,
        temperature=config.sampling.eval_temperature,
        seed=config.seed,
        stream="eval",
    )
    await parts.attempts.gather(order, "held-out tasks " + phase.removeprefix("eval-") + " training")
