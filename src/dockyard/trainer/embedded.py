"""The learner in this process, and the engine beside it that shares the weights that are not trained."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from dockyard.config import RunConfig
from dockyard.engine import Engine
from dockyard.engine.four_bit import quantised_share
from dockyard.engine.transformers import TransformersEngine
from dockyard.engine.weights import load_model
from dockyard.run_dir import RunDir
from dockyard.trainer.loop import PublishedPolicy
from dockyard.trainer.memory import beside_training, refuse_too_large
from dockyard.trainer.off_policy import measure
from dockyard.trainer.policy import Policy
from dockyard.types import Group

logger = logging.getLogger(__name__)

_WORTH_QUANTISING = 0.5


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
    base = await asyncio.to_thread(_load_base, config, model_dir, say, with_engine=served is Served.HERE)
    policy = await _load_policy(config, run, base, say, recorded)
    embedded = _embedded_engine(config, policy) if served is Served.HERE else None
    engine = embedded if isinstance(served, Served) else served
    try:
        yield PublishedPolicy(policy=policy, engine=engine, run=run, config=config)
    finally:
        if embedded:
            await embedded.close()


def _embedded_engine(config: RunConfig, policy: Policy) -> TransformersEngine:
    model = policy.serving_model()
    full = config.trainer.method == "full"
    return TransformersEngine(model, beside_training(config.engine, model) if full else config.engine)


def _load_base(config: RunConfig, model_dir: Path, say: Callable[[str], None], *, with_engine: bool) -> Any:
    method = config.trainer.method
    say(f"loading {config.model.name}" + (" in 4 bits" if method == "qlora" else ""))
    base = load_model(model_dir, config.model, four_bit=method == "qlora")
    if method == "qlora" and (share := quantised_share(base)) < _WORTH_QUANTISING:
        logger.warning(
            "only %.0f %% of the weights of `%s` have 4 bits: embeddings and experts keep all of theirs",
            100 * share,
            base.config.model_type,
        )
    if config.trainer.offload and base.device.type == "cpu":
        logger.warning("`trainer.offload` has no effect without a GPU: the model is on the CPU")
    if method == "full":
        with_reference = config.grpo.kl_coef > 0 or config.tasks.source == "recorded"
        refuse_too_large(base, num_copies=with_engine + with_reference)
    return base


async def _load_policy(
    config: RunConfig, run: RunDir, base: Any, say: Callable[[str], None], recorded: tuple[Group, ...]
) -> Policy:
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
