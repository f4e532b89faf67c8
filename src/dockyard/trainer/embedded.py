"""The learner in this process, and the engine beside it that shares its weights."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path

from dockyard.config import RunConfig
from dockyard.engine import Engine
from dockyard.engine.transformers import TransformersEngine
from dockyard.engine.weights import load_model
from dockyard.run_dir import RunDir
from dockyard.trainer.loop import PublishedPolicy
from dockyard.trainer.off_policy import measure
from dockyard.trainer.policy import Policy
from dockyard.types import Group

logger = logging.getLogger(__name__)


class Served(Enum):
    """By what the learner's versions are served, if not by a given engine."""

    HERE = "the embedded engine"
    NOT = "nothing"


@asynccontextmanager
async def open_learner(
    config: RunConfig,
    run: RunDir,
    model_dir: Path,
    say: Callable[[str], None],
    *,
    served: Engine | Served,
    recorded: tuple[Group, ...] = (),
) -> AsyncGenerator[PublishedPolicy]:
    """A learner as the run left it. `recorded` is what it will learn from, if that is known."""
    policy = await _load_policy(config, run, model_dir, say, recorded)
    embedded = TransformersEngine(policy.serving_model(), config.engine) if served is Served.HERE else None
    engine = embedded if isinstance(served, Served) else served
    try:
        yield PublishedPolicy(policy=policy, engine=engine, run=run, config=config)
    finally:
        if embedded:
            await embedded.close()


async def _load_policy(
    config: RunConfig, run: RunDir, model_dir: Path, say: Callable[[str], None], recorded: tuple[Group, ...]
) -> Policy:
    say(f"loading {config.model.name}")
    base = await asyncio.to_thread(load_model, model_dir, config.model)
    policy = Policy(
        base,
        config.trainer,
        config.grpo,
        temperature=config.sampling.temperature,
        seed=config.seed,
        anchored=config.tasks.source == "recorded",
    )
    if checkpoint := run.latest_checkpoint():
        policy.restore(checkpoint.path)
        say(f"resuming after step {policy.version}")
    elif recorded:
        found = await asyncio.to_thread(measure, policy, recorded, config.trainer.micro_batch_tokens)
        if found:
            logger.warning(found.warning(config.steps))
    return policy
