"""The weights being trained: LoRA adapters over a frozen base, their optimiser, and one GRPO update.

The reference policy of the KL penalty is the same model with its adapters off: there is no second copy.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dockyard.config import GRPOConfig, TrainerConfig
from dockyard.engine.weights import share_weights
from dockyard.errors import DockyardError
from dockyard.rl.examples import examples_of
from dockyard.rl.loss import Batch, batch_loss, mismatch_kl
from dockyard.rl.pack import Row, pack
from dockyard.trainer import checkpoint
from dockyard.trainer.network import Network
from dockyard.types import Group

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
        self._network = Network(base, trainer)
        self.model = self._network.model
        self.version = 0
        self._config = trainer
        self._grpo = grpo
        self._temperature = temperature
        self._anchored = anchored
        self._trained = self._network.trained
        self._optimizer = torch.optim.AdamW(
            self._trained,
            lr=trainer.lr,
            betas=(0.9, trainer.adam_beta2),
            weight_decay=trainer.weight_decay,
            fused=self.model.device.type == "cuda",
        )

    def serving_model(self) -> Any:
        """A model for the engine: the same base weights, its own adapters."""
        return share_weights(self.model)

    def update(self, groups: Sequence[Group], num_steps: int) -> dict[str, float]:
        """One optimiser step on these groups, the learning rate as far along as `version` is of `num_steps`."""
        examples = examples_of(groups, self._grpo, with_idle=self._grpo.kl_coef > 0)
        rows = pack(examples, self._config.micro_batch_tokens)
        metrics = self.train_on(rows, learning_rate(self._config, self.version, num_steps))
        self.version += 1
        return metrics

    def train_on(self, rows: Sequence[Row], lr: float) -> dict[str, float]:
        """One optimiser step on these rows."""
        self._optimizer.zero_grad()
        totals = _Totals()
        for row in rows:
            self._within_memory(row, totals)
        metrics = totals.metrics() | {
            "train/lr": lr,
            "train/packed_tokens": float(sum(len(row.token_ids) for row in rows)),
        }
        if rows:
            metrics["train/grad_norm"] = self._step(lr)
            metrics["train/skipped"] = float(not math.isfinite(metrics["train/grad_norm"]))
        return metrics

    def _step(self, lr: float) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained, self._config.max_grad_norm))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if math.isfinite(norm):
            self._optimizer.step()
        return norm

    def _within_memory(self, row: Row, totals: "_Totals") -> None:
        """A row that does not fit is tried again with less kept of its forward pass; nothing of it is counted twice."""
        for _ in range(_MEMORY_TRIES):
            try:
                return self._accumulate(row, totals)
            except torch.OutOfMemoryError:
                pass  # what it had made goes with the error, so only now is there room
            if not self._network.save_memory():
                break
        raise DockyardError(
            f"a row of {len(row.token_ids):,} tokens does not fit the GPU's memory",
            hint="lower `--trainer.micro_batch_tokens`, or give the engine less memory",
        )

    def _accumulate(self, row: Row, totals: "_Totals") -> None:
        """Add one row's part of the loss to the gradients."""
        self.model.train()
        scores = self._network.scores(row, self._temperature)
        batch = self._batch(row, scores.logprobs_N)
        loss = batch_loss(batch, self._grpo)
        for parameter, grad in zip(self._trained, torch.autograd.grad(loss.total, self._trained), strict=True):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        totals.add(
            loss=loss.total.detach(),
            clipped=loss.clipped_N.sum(),
            kl=loss.kl_N.sum(),
            mismatch=(batch.logprobs_N.detach() - batch.recorded_N).abs().sum(),
            mismatch_kl=mismatch_kl(batch).sum(),
            logprob=batch.logprobs_N.detach().sum(),
            entropy=scores.entropy_N.sum(),
            likeliest=scores.likeliest_N.sum(),
            tokens=len(row.targets),
        )

    def _batch(self, row: Row, logprobs_N: Tensor) -> Batch:
        """A row's trained tokens under the weights that the loss compares."""
        device = self.model.device
        present_N = logprobs_N.detach()
        recorded_N = torch.from_numpy(row.old_logprobs).to(device)
        unknown_N = recorded_N.isnan()
        anchored = self._anchored and bool(unknown_N.any())
        reference_N = None
        if anchored or self._grpo.kl_coef > 0:
            reference_N = self._network.reference(row, self._temperature)
        drawn_N = torch.where(unknown_N, present_N if reference_N is None or not anchored else reference_N, recorded_N)
        return Batch(
            logprobs_N=logprobs_N,
            old_N=drawn_N if self._grpo.correction == "none" else present_N,
            recorded_N=drawn_N,
            reference_N=reference_N,
            advantages_N=torch.from_numpy(row.advantages).to(device),
            weights_N=torch.from_numpy(row.weights).to(device),
            segments_N=torch.from_numpy(row.segments).long().to(device),
        )

    def logprobs(self, row: Row) -> Tensor:
        """Of a row's trained tokens, under the temperature they were sampled with."""
        return self._network.scores(row, self._temperature).logprobs_N

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter as PEFT, vLLM and the Hub read it."""
        checkpoint.save_adapter(self.model, folder)

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


class _Totals:
    """Sums over the rows of one update, read from the device once."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}

    def add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            exact = value.double() if isinstance(value, Tensor) else value
            self._sums[name] = self._sums.get(name, 0.0) + exact

    def metrics(self) -> dict[str, float]:
        sums = {name: float(value) for name, value in self._sums.items()}
        tokens = sums.get("tokens", 0.0)
        per_token = {
            "train/clip_fraction": "clipped",
            "train/kl": "kl",
            "train/logprob_mismatch": "mismatch",
            "train/mismatch_kl": "mismatch_kl",
            "train/mean_logprob": "logprob",
            "train/entropy": "entropy",
            "train/likeliest": "likeliest",
        }
        return {
            "train/loss": sums.get("loss", 0.0),
            "train/tokens": tokens,
            **{name: sums[key] / tokens for name, key in per_token.items() if tokens},
        }
