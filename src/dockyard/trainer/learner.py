"""The learner in this process, and the engine beside it that shares the frozen weights.

Before training on rollouts that the policy did not sample, it reports how far they are from the policy.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from math import exp
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from dockyard.config import RunConfig
from dockyard.engine.embedded.engine import TransformersEngine
from dockyard.engine.protocol import Engine
from dockyard.engine.weights import load_model, quantised_share
from dockyard.rl.pack import examples_of, pack
from dockyard.run_dir.run import RunDir
from dockyard.trainer.loop import PublishedPolicy
from dockyard.trainer.memory import beside_training, refuse_too_large
from dockyard.trainer.policy import Policy
from dockyard.types import FloatArray, Group

_UNLIKELY = 0.01
_MAX_SEGMENTS = 64
"""Enough for two digits, and quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicy:
    """Recorded tokens as the policy sees them before the first update."""

    tokens: int
    mean_logprob: float
    unlikely: float
    """The share of tokens that the policy would draw less than once in a hundred times."""
    mismatch: float | None
    """Mean distance to the recorded logprobs; None when nobody recorded any."""

    @classmethod
    def of(cls, logprobs: FloatArray, recorded: FloatArray) -> Self:
        known = ~np.isnan(recorded)
        distances = np.abs(logprobs - recorded)[known]
        return cls(
            tokens=len(logprobs),
            mean_logprob=float(logprobs.mean()),
            unlikely=float((np.exp(logprobs) < _UNLIKELY).mean()),
            mismatch=float(distances.mean()) if len(distances) else None,
        )

    def warning(self, num_steps: int) -> str:
        """For people."""
        known = (
            "no logprobs were recorded: those of the base model stand in for them"
            if self.mismatch is None
            else f"their recorded logprobs are {self.mismatch:.3f} nats off on average"
        )
        return (
            f"off-policy: these rollouts are not the policy's own. Over {self.tokens:,} of their tokens "
            f"its perplexity is {exp(min(-self.mean_logprob, 50.0)):.2f}, and it would draw {self.unlikely:.1%} of "
            f"them less than once in 100 times; {known}. {num_steps} updates will move it further away"
        )


def measure(policy: Policy, groups: Sequence[Group], micro_batch_tokens: int) -> OffPolicy | None:
    """Over some of the segments, evenly spread; None when no token is to be trained."""
    examples = examples_of(groups, with_idle=True)
    chosen = examples[:: max(1, len(examples) // _MAX_SEGMENTS)]
    rows = pack(chosen, micro_batch_tokens)
    if not rows:
        return None
    with torch.no_grad():
        logprobs = [policy.logprobs(row).float().cpu().numpy() for row in rows]
    return OffPolicy.of(np.concatenate(logprobs), np.concatenate([row.old_logprobs for row in rows]))


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
    if checkpoint := run.checkpoints.latest():
        policy.restore(checkpoint.path)
        say(f"resuming after step {policy.version}")
    elif recorded:
        found = await asyncio.to_thread(measure, policy, recorded, config.trainer.micro_batch_tokens)
        if found:
            logger.warning(found.warning(config.steps))
    return policy
