"""The learner in this process: a policy, and the engine to which its versions are published.

Before training on rollouts that the policy did not sample, it reports how far they are from the policy.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import exp
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from dockyard.config import RunConfig
from dockyard.engine.custom import CheckedEngine
from dockyard.engine.embedded.engine import TransformersEngine
from dockyard.engine.protocol import Engine, GenerateRequest, Generation
from dockyard.engine.weights import load_model, quantised_share
from dockyard.rl.pack import Example, examples_of, pack
from dockyard.run_dir.run import RunDir
from dockyard.trainer.memory import beside_training, refuse_too_large
from dockyard.trainer.policy import Policy
from dockyard.trainer.record import is_saved
from dockyard.types import FloatArray, Group

logger = logging.getLogger(__name__)

_UNLIKELY = 0.01
_MAX_SEGMENTS = 64
"""Enough for an estimate with two digits."""
_WORTH_QUANTISING = 0.5
_COMPARED_TOKENS = 32
_MOST_DISTANCE = 0.5
"""In nats. Another number format, 4 bits included, costs less; another model or a wrong temperature more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicy:
    """How likely recorded tokens are under the policy before its first update."""

    tokens: int
    mean_logprob: float
    unlikely: float
    """The share of tokens with a probability below 0.01."""
    mismatch: float | None
    """Mean distance to the recorded logprobs; None if none were recorded."""

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
        """The numbers as a message."""
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
    """Measure some of the segments, evenly spread; None if no token is trained."""
    examples = examples_of(groups, with_idle=True)
    chosen = examples[:: max(1, len(examples) // _MAX_SEGMENTS)]
    rows = pack(chosen, micro_batch_tokens)
    if not rows:
        return None
    with torch.no_grad():
        logprobs = [policy.logprobs(row).float().cpu().numpy() for row in rows]
    return OffPolicy.of(np.concatenate(logprobs), np.concatenate([row.old_logprobs for row in rows]))


@dataclass(slots=True, kw_only=True)
class LocalLearner:
    """Implements `Learner` with a policy in this process. Its versions are published to `engine`, if there is one."""

    policy: Policy
    engine: Engine | None
    run: RunDir
    config: RunConfig
    # Always the same thread: each new thread would keep gigabytes of freed memory to itself.
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "dockyard-trainer"))

    @property
    def version(self) -> int:
        return self.policy.version

    async def update(self, groups: tuple[Group, ...]) -> dict[str, float]:
        return await self._in_thread(self.policy.update, groups, self.config.steps)

    async def publish(self) -> None:
        # Adapters that may still be served stay: a server may read one again for a request in progress.
        self.run.keep_adapters(self.version - 1 - self.config.rollout.max_staleness)
        folder = await self._in_thread(self.run.publish_adapter, self.version, self.policy.save_weights)
        if self.engine:
            await self.engine.publish(folder, self.version)

    async def check_engine(self, engine: CheckedEngine, prompt_ids: Sequence[int]) -> None:
        """Compare the engine's logprobs with the policy's before the first update, while both have the same weights."""
        if self.version > 0:
            return
        request = GenerateRequest(
            prompt_ids=np.array(prompt_ids, np.int32),
            max_new_tokens=_COMPARED_TOKENS,
            temperature=self.config.sampling.temperature,
            stop_ids=frozenset(),
            seed=self.config.seed,
        )
        found = await engine.generate(request)
        if isinstance(found, Generation):
            logprobs = await self._in_thread(_logprobs_of, self.policy, request, found)
            distance = float(np.abs(logprobs - found.logprobs).mean())
            if distance > _MOST_DISTANCE:
                raise engine.error(
                    f"returned logprobs that are {distance:.2f} nats off on average from those of "
                    f"`{self.config.model.name}` in the trainer, over {len(logprobs)} tokens"
                )

    async def checkpoint(self) -> None:
        if is_saved(self.config, self.version):
            await self._in_thread(self._save)

    async def _in_thread[**P, T](self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call off the event loop, which continues to serve rollouts."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args, **kwargs))

    def _save(self) -> None:
        with self.run.checkpoints.new(self.version) as folder:
            self.policy.save(folder)
        self.run.checkpoints.keep_last(self.config.trainer.keep_last)


def _logprobs_of(policy: Policy, request: GenerateRequest, found: Generation) -> FloatArray:
    ids = np.concatenate([request.prompt_ids, found.token_ids])
    targets = np.arange(len(request.prompt_ids), len(ids), dtype=np.int32)
    [row] = pack([Example(token_ids=ids, targets=targets, old_logprobs=None, advantage=0, weight=0)], len(ids))
    with torch.no_grad():
        return policy.logprobs(row).float().cpu().numpy()


@asynccontextmanager
async def open_embedded_learner(
    run: RunDir, model_dir: Path, say: Callable[[str], None], *, recorded: tuple[Group, ...] = ()
) -> AsyncGenerator[LocalLearner]:
    """Load the run's learner from its last checkpoint, with an embedded engine that shares its frozen weights."""
    policy = await _load_policy(run, model_dir, say, recorded, with_engine=True)
    engine = _embedded_engine(run.config, policy)
    try:
        yield LocalLearner(policy=policy, engine=engine, run=run, config=run.config)
    finally:
        await engine.close()


async def load_learner(
    run: RunDir,
    model_dir: Path,
    say: Callable[[str], None],
    *,
    engine: Engine | None,
    recorded: tuple[Group, ...] = (),
) -> LocalLearner:
    """Load the run's learner from its last checkpoint, published to `engine` if there is one.

    `recorded` are the groups it will be trained on, if they are known in advance.
    """
    policy = await _load_policy(run, model_dir, say, recorded, with_engine=False)
    return LocalLearner(policy=policy, engine=engine, run=run, config=run.config)


def _embedded_engine(config: RunConfig, policy: Policy) -> TransformersEngine:
    model = policy.serving_model()
    full = config.trainer.method == "full"
    return TransformersEngine(model, beside_training(config.engine, model) if full else config.engine)


async def _load_policy(
    run: RunDir, model_dir: Path, say: Callable[[str], None], recorded: tuple[Group, ...], *, with_engine: bool
) -> Policy:
    config = run.config
    base = await asyncio.to_thread(_load_base, config, model_dir, say, with_engine=with_engine)
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
