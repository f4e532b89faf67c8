"""The weights being trained, LoRA adapters over a frozen base or all of them, their optimiser, and one GRPO update.

The reference policy of the KL penalty is the same model with its adapters off: there is no second copy. A model that
is trained as a whole has none to switch off, so there it is a copy.
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
from dockyard.rl.loss import Batch, batch_loss, mismatch_kl
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

    Tokens whose logprobs nobody recorded are taken to have been drawn by the present weights; `anchored` takes them to
    come from the base model instead, so that clipping holds when the same rollouts are met again and again.
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
        self._temperature = temperature
        self._anchored = anchored
        self._trained = self._network.trained
        self._optimizer = Optimizer(self._trained, trainer)

    def serving_model(self) -> Any:
        """A model for the engine: the same frozen weights, its own of what is trained."""
        return share_weights(self.model)

    def update(self, groups: Sequence[Group], num_steps: int) -> dict[str, float]:
        """One optimiser step on these groups, the learning rate as far along as `version` is of `num_steps`."""
        examples = examples_of(groups, self._grpo, with_idle=self._grpo.kl_coef > 0)
        trees = plant(examples, self._config.micro_batch_tokens)
        metrics = self.train_on(trees, learning_rate(self._config, self.version, num_steps))
        self.version += 1
        return metrics

    def train_on(self, trees: Sequence[Tree], lr: float) -> dict[str, float]:
        """One optimiser step on these trees."""
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
        """A tree that does not fit is tried again with less kept of its forward pass; nothing is counted twice."""
        longest = max(len(tree.trunk) + len(row.token_ids) for row in tree.rows)
        said = ""
        for _ in range(_MEMORY_TRIES):
            try:
                return self._accumulate(tree, totals)
            except torch.OutOfMemoryError as error:
                said = str(error).partition(". ")[0]  # what was made goes with the error, so only then is there room
            if not self._network.save_memory():
                break
            logger.info("a row of %s tokens did not fit (%s): trying again, keeping less", f"{longest:,}", said)
        raise DockyardError(
            f"a row of {longest:,} tokens does not fit the GPU's memory: {said}",
            hint="lower `--trainer.micro_batch_tokens`, give the engine less memory, or set `--trainer.offload true`",
        )

    def _accumulate(self, tree: Tree, totals: "_Totals") -> None:
        """Add one tree's part of the loss to the gradients: its trunk forward, row after row, its trunk backward."""
        found = _Totals()
        sums: list[Tensor] = []
        references = self._references(tree)
        with self._network.trunk(tree.trunk, max(len(row.token_ids) for row in tree.rows)) as trunk:
            leaves = [trunk.hidden_PD] if trunk else []
            for row, reference_N in zip(tree.rows, references, strict=True):
                total = self._loss(row, trunk, reference_N, found)
                _add(sums, torch.autograd.grad(total, [*self._trained, *leaves], materialize_grads=True))
            if trunk:
                _add(sums, trunk.grads(sums.pop(), self._trained))
        self._optimizer.add(sums)
        totals.add(**found.sums)

    def _loss(self, row: PackedRow, trunk: PrefixPass | None, reference_N: Tensor | None, totals: "_Totals") -> Tensor:
        scores = self._network.scores(row, self._temperature, trunk)
        batch = self._batch(row, scores.logprobs_N, reference_N)
        loss = batch_loss(batch, self._grpo)
        known_N = torch.from_numpy(~np.isnan(row.old_logprobs) | self._anchored).to(batch.recorded_N.device)
        totals.add(
            loss=loss.total.detach(),
            clipped=loss.clipped_N.sum(),
            kl=loss.kl_N.sum(),
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
        """The logprobs of each row's trained tokens under the base model, if the loss has a use for them."""
        unknown = any(bool(np.isnan(row.old_logprobs).any()) for row in tree.rows)
        if self._grpo.kl_coef > 0 or (self._anchored and unknown):
            return self._network.reference(tree, self._temperature)
        return [None] * len(tree.rows)

    def _batch(self, row: PackedRow, logprobs_N: Tensor, reference_N: Tensor | None) -> Batch:
        """A row's trained tokens under the weights that the loss compares."""
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
        """Of a row's trained tokens, under the temperature they were sampled with."""
        return self._network.scores(row, self._temperature).logprobs_N

    def save_weights(self, folder: Path) -> None:
        """Write what is trained as PEFT or transformers, vLLM and the Hub read it."""
        checkpoint.save_weights(self.model, folder)

    def save(self, folder: Path) -> None:
        """Write everything a resumed run needs."""
        checkpoint.save(folder, self.model, self._optimizer, self.version)

    def restore(self, folder: Path) -> None:
        """Take up where `save` left off."""
        self.version = checkpoint.restore(folder, self.model, self._optimizer)


def learning_rate(config: TrainerConfig, step: int, num_steps: int) -> float:
    """Of the update from version `step` on."""
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
    """Sums over the rows of one update, read from the device once."""

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
