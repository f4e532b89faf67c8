"""One training run, from its settings to its summary."""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from dockyard import interrupt
from dockyard.collect import check_run, open_pool
from dockyard.collect.gather import tasks_of
from dockyard.config import RunConfig
from dockyard.engine.checks import Wanted
from dockyard.engine.connect import connect
from dockyard.engine.model_dir import find_model
from dockyard.engine.openai import TextEndpoint
from dockyard.engine.remote import RemoteEngine
from dockyard.engine.transformers import TransformersEngine
from dockyard.engine.weights import load_model
from dockyard.errors import DockyardError
from dockyard.gateway.render import Renderer
from dockyard.rollout.pool import Order
from dockyard.run_dir import EVAL_AFTER, EVAL_BEFORE, RunDir
from dockyard.trainer.loop import PublishedPolicy, StepRecord, TaskRollouts, train
from dockyard.trainer.policy import Policy
from dockyard.trainer.progress import Progress
from dockyard.trainer.report import draw_curve, report, summarise
from dockyard.types import Task

logger = logging.getLogger(__name__)

_TIMID_LR = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    train_tasks: list[Task]
    heldout_tasks: list[Task]
    model_dir: Path
    renderer: Renderer


def run_training(config: RunConfig, *, run_dir: RunDir) -> None:
    """Train, evaluate before and after, and leave a summary. What can be known to fail fails before the first rollout.

    A run folder with records in it is taken up where it was left.
    """
    start = time.monotonic()
    inputs = _prepare(config, run_dir)
    with Progress(config.steps) as progress:
        interrupt.run(_run(config, run_dir, inputs, progress))
    summary = summarise(run_dir, wall_s=time.monotonic() - start)
    draw_curve(summary, run_dir.curve)
    sys.stderr.write(f"\n{report(run_dir, summary)}\n")


def _prepare(config: RunConfig, run: RunDir) -> _Inputs:
    check_run(config)
    if 0 < config.trainer.lr < _TIMID_LR:
        logger.warning("`trainer.lr` is %g: below %g a LoRA barely moves", config.trainer.lr, _TIMID_LR)
    model_dir = find_model(config.model.name)
    return _Inputs(
        train_tasks=tasks_of(run, "train"),
        heldout_tasks=tasks_of(run, "heldout") if config.tasks.source == "demo" or config.tasks.heldout else [],
        model_dir=model_dir,
        renderer=Renderer.load(model_dir, config.model.name),
    )


async def _run(config: RunConfig, run: RunDir, inputs: _Inputs, progress: Progress) -> None:
    async with _open(config, run, inputs, progress) as (rollouts, learner):
        await learner.publish()
        await _evaluate(config, rollouts, inputs.heldout_tasks, EVAL_BEFORE)
        await train(config.steps, rollouts, learner, StepRecord(run, progress, learner))
        await _evaluate(config, rollouts, inputs.heldout_tasks, EVAL_AFTER)


@asynccontextmanager
async def _open(
    config: RunConfig, run: RunDir, inputs: _Inputs, progress: Progress
) -> AsyncGenerator[tuple[TaskRollouts, PublishedPolicy]]:
    """Model, engine and gateway, all ended with the block."""
    async with AsyncExitStack() as stack:
        server = await open_server(config, inputs.model_dir)
        if server:
            stack.push_async_callback(server.close)
        policy = await _load_policy(config, run, inputs.model_dir, progress)
        engine = server or TransformersEngine(policy.serving_model(), config.engine)
        if not server:
            stack.push_async_callback(engine.close)
        pool = await stack.enter_async_context(open_pool(config, run, engine, inputs.renderer, progress.phases))
        rollouts = TaskRollouts(pool=pool, tasks=inputs.train_tasks, config=config, progress=progress)
        stack.push_async_callback(rollouts.close)
        yield rollouts, PublishedPolicy(policy=policy, engine=engine, run=run, config=config)


async def open_server(config: RunConfig, model_dir: Path) -> RemoteEngine | None:
    """The server that the settings name, checked before any weights are loaded; None for the embedded engine."""
    if config.engine.type == "transformers":
        return None
    num_versions = config.rollout.max_staleness + 1
    wanted = Wanted.of(config.model.name, model_dir, config.trainer.lora_r, num_versions)
    server = await connect(config.engine, wanted)
    if isinstance(server, TextEndpoint):
        await server.close()
        raise DockyardError(
            f"`{config.engine.url}` returns no token ids, so there is nothing to train on exactly",
            hint="train with `--engine.type vllm` or `sglang`; `dockyard serve` can put this endpoint before agents",
        )
    return server


async def _load_policy(config: RunConfig, run: RunDir, model_dir: Path, progress: Progress) -> Policy:
    progress.say(f"loading {config.model.name}")
    base = await asyncio.to_thread(load_model, model_dir, config.model)
    policy = Policy(base, config.trainer, config.grpo, temperature=config.sampling.temperature, seed=config.seed)
    if checkpoint := run.latest_checkpoint():
        policy.restore(checkpoint.path)
        progress.say(f"resuming after step {policy.version}")
    return policy


async def _evaluate(config: RunConfig, rollouts: TaskRollouts, heldout: list[Task], phase: str) -> None:
    """The same tasks, agent and seeds before and after."""
    if not heldout:
        return
    order = Order(
        phase=phase,
        tasks=heldout,
        group_size=config.eval.samples,
        temperature=config.sampling.eval_temperature,
        seed=config.seed,
        stream="eval",
    )
    await rollouts.gather(order, "held-out tasks " + phase.removeprefix("eval-") + " training")
