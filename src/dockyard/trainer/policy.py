"""The policy: the weights being trained (LoRA adapters over a frozen base, or all weights), and one GRPO update.

The reference policy of the KL penalty is the same model with its adapters disabled, so there is no second copy. Full
training has no adapters to disable, so there the reference is a copy.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dockyard.config import GRPOConfig, TrainerConfig
from dockyard.engine.weights import share_weights
from dockyard.errors import DockyardError
from dockyard.rl.loss import Batch, load_loss, mismatch_kl
from dockyard.rl.pack import PackedRow, examples_of
from dockyard.rl.trees import Tree, plant
from dockyard.trainer import checkpoint
from dockyard.trainer.attention import wide
from dockyard.trainer.network import Network, PrefixPass
from dockyard.trainer.optimizer import Optimizer
from dockyard.types import Group

logger = logging.getLogger(__name__)

_MEMORY_TRIES = 4


class Policy:
    """Trains on groups of rollouts. `version` counts the updates so far.

    Tokens without recorded logprobs are treated as sampled by the current weights. With `anchored` they are treated as
    sampled by the base model, so that clipping has an effect if the same rollouts are trained on repeatedly.
    """

    def __init__(
        self,
        base: Any,
        trainer: TrainerConfig,
        grpo: GRPOConfig,
        *,
        temperature: float,
        seed: int,
        anchored: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        self._network = Network(base, trainer, with_reference=grpo.kl_coef > 0 or anchored)
        self.model = self._network.model
        self.version = 0
        self._config = trainer
        self._grpo = grpo
        self._loss_function = load_loss(grpo)
        self._temperature = temperature
        self._anchored = anchored
        self._trained = self._network.trained
        self._optimizer = Optimizer(self._trained, trainer)

    def serving_model(self) -> Any:
        """A model for the engine: it shares the frozen weights and has its own copy of the trained ones."""
        return share_weights(self.model)

    def update(self, groups: Sequence[Group], num_steps: int) -> dict[str, float]:
        """Take one optimizer step on these groups. `num_steps` is the length of the learning rate schedule."""
        # A user-defined loss may have a gradient where the advantage is 0.
        with_idle = self._grpo.kl_coef > 0 or self._grpo.loss is not None
        examples = examples_of(groups, self._grpo, with_idle=with_idle)
        trees = plant(examples, self._config.micro_batch_tokens)
        metrics = self.train_on(trees, learning_rate(self._config, self.version, num_steps))
        self.version += 1
        return metrics

    def train_on(self, trees: Sequence[Tree], lr: float) -> dict[str, float]:
        """Take one optimizer step on these trees."""
        self._optimizer.zero_grad()
        totals = _Totals()
        for tree in trees:
            self._within_memory(tree, totals)
        metrics = totals.metrics() | {
            "train/lr": lr,
            "train/packed_tokens": float(sum(tree.num_tokens for tree in trees)),
        }
        if trees:
            metrics["train/grad_norm"] = self._optimizer.step(lr)
            metrics["train/skipped"] = float(not math.isfinite(metrics["train/grad_norm"]))
        return metrics

    def _within_memory(self, tree: Tree, totals: "_Totals") -> None:
        """Retry a tree that does not fit in memory, keeping fewer activations. Nothing is counted twice."""
        longest = max(len(tree.prefix) + len(row.token_ids) for row in tree.rows)
        said = ""
        for _ in range(_MEMORY_TRIES):
            try:
                return self._accumulate(tree, totals)
            except torch.OutOfMemoryError as error:
                said = str(error).partition(". ")[0]  # memory is free only once the error and its traceback are
            if not self._network.save_memory():
                break
            logger.info("a row of %s tokens did not fit (%s): retrying with fewer activations", f"{longest:,}", said)
        raise DockyardError(
            f"a row of {longest:,} tokens does not fit the GPU's memory: {said}",
            hint="lower `--trainer.micro_batch_tokens`, give the engine less memory, or set `--trainer.offload true`",
        )

    def _accumulate(self, tree: Tree, totals: "_Totals") -> None:
        """Add the gradients of one tree: prefix forward, each row forward and backward, prefix backward."""
        found = _Totals()
        sums: list[Tensor] = []
        references = self._references(tree)
        with self._network.prefix(tree.prefix, max(len(row.token_ids) for row in tree.rows)) as prefix:
            leaves = [prefix.hidden_PD] if prefix else []
            for row, reference_N in zip(tree.rows, references, strict=True):
                total = self._loss(row, prefix, reference_N, found)
                _add(sums, torch.autograd.grad(total, [*self._trained, *leaves], materialize_grads=True))
            if prefix:
                _add(sums, prefix.grads(sums.pop(), self._trained))
        self._optimizer.add(sums)
        totals.add(**found.sums)

    def _loss(self, row: PackedRow, prefix: PrefixPass | None, reference_N: Tensor | None, totals: "_Totals") -> Tensor:
        scores = self._network.scores(row, self._temperature, prefix)
        batch = self._batch(row, scores.logprobs_N, reference_N)
        loss = self._loss_function(batch, self._grpo)
        known_N = torch.from_numpy(~np.isnan(row.old_logprobs) | self._anchored).to(batch.recorded_N.device)
        totals.add(
            loss=loss.total.detach(),
            clipped=loss.clipped_N.detach().sum(),
            kl=loss.kl_N.detach().sum(),
            mismatch=(batch.logprobs_N.detach() - batch.recorded_N).abs()[known_N].sum(),
            mismatch_kl=mismatch_kl(batch)[known_N].sum(),
            known=known_N.sum(),
            logprob=batch.logprobs_N.detach().sum(),
            entropy=scores.entropy_N.sum(),
            likeliest=scores.likeliest_N.sum(),
            tokens=len(row.targets),
        )
        return loss.total

    def _references(self, tree: Tree) -> Sequence[Tensor | None]:
        """The logprobs of each row's trained tokens under the base model, if the loss uses them."""
        unknown = any(bool(np.isnan(row.old_logprobs).any()) for row in tree.rows)
        if self._grpo.kl_coef > 0 or (self._anchored and unknown):
            return self._network.reference(tree, self._temperature)
        return [None] * len(tree.rows)

    def _batch(self, row: PackedRow, logprobs_N: Tensor, reference_N: Tensor | None) -> Batch:
        """The trained tokens of a row with the logprobs that the loss compares."""
        device = self.model.device
        present_N = logprobs_N.detach()
        recorded_N = torch.from_numpy(row.old_logprobs).to(device)
        guessed_N = reference_N if self._anchored and reference_N is not None else present_N
        drawn_N = torch.where(recorded_N.isnan(), guessed_N, recorded_N)
        return Batch(
            logprobs_N=logprobs_N,
            old_N=drawn_N if self._grpo.correction == "none" else present_N,
            recorded_N=drawn_N,
            reference_N=reference_N,
            advantages_N=torch.from_numpy(row.advantages).to(device),
            weights_N=torch.from_numpy(row.weights).to(device),
            segments_N=torch.from_numpy(row.segments).long().to(device),
        )

    def logprobs(self, row: PackedRow) -> Tensor:
        """The logprobs of a row's trained tokens, at the temperature they were sampled with."""
        return self._network.scores(row, self._temperature).logprobs_N

    def save_weights(self, folder: Path) -> None:
        """Write the trained weights in the format of PEFT or transformers."""
        checkpoint.save_weights(self.model, folder)

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        checkpoint.save(folder, self.model, self._optimizer, self.version)

    def restore(self, folder: Path) -> None:
        """Restore a checkpoint."""
        self.version = checkpoint.restore(folder, self.model, self._optimizer)


def learning_rate(config: TrainerConfig, step: int, num_steps: int) -> float:
    """The learning rate of the update from version `step` to the next."""
    rise = min(1.0, (step + 1) / (config.warmup_steps + 1))
    fall = 1.0 - step / num_steps if config.schedule == "linear" else 1.0
    return config.lr * rise * fall


def _add(sums: list[Tensor], grads: Sequence[Tensor]) -> None:
    if not sums:
        sums.extend(grads)
    else:
        for index, grad in enumerate(grads):
            sums[index] = wide(sums[index]).add_(grad)


class _Totals:
    """Sums over the rows of one update, copied from the device once."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor | float] = {}

    def add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            exact = value.double() if isinstance(value, Tensor) else value
            self.sums[name] = self.sums.get(name, 0.0) + exact

    def metrics(self) -> dict[str, float]:
        sums = {name: float(value) for name, value in self.sums.items()}
        tokens, known = sums.get("tokens", 0.0), sums.get("known", 0.0)
        per_known = {"train/logprob_mismatch": "mismatch", "train/mismatch_kl": "mismatch_kl"}
        per_token = {
            "train/clip_fraction": "clipped",
            "train/kl": "kl",
            "train/mean_logprob": "logprob",
            "train/entropy": "entropy",
            "train/likeliest": "likeliest",
        }
        return {
            "train/loss": sums.get("loss", 0.0),
            "train/tokens": tokens,
            **{name: sums[key] / tokens for name, key in per_token.items() if tokens},
            **{name: sums[key] / known for name, key in per_known.items() if known},
        }
