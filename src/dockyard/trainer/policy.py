"""The weights being trained: LoRA adapters over a frozen base, their optimiser, and one GRPO update.

The reference policy of the KL penalty is the same model with its adapters off: there is no second copy.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from dockyard.config import GRPOConfig, TrainerConfig
from dockyard.engine.weights import share_weights
from dockyard.rl.examples import examples_of
from dockyard.rl.loss import Batch, batch_loss, mismatch_kl
from dockyard.rl.pack import Row, pack
from dockyard.trainer import checkpoint
from dockyard.types import Group


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
        lora = LoraConfig(
            r=trainer.lora_r, lora_alpha=trainer.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        self.model: Any = get_peft_model(base, lora)
        self.version = 0
        self._config = trainer
        self._grpo = grpo
        self._temperature = temperature
        self._anchored = anchored
        self._trained: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained, lr=trainer.lr, betas=(0.9, trainer.adam_beta2), weight_decay=trainer.weight_decay
        )

    def serving_model(self) -> Any:
        """A model for the engine: the same base weights, its own adapters."""
        return share_weights(self.model)

    def update(self, groups: Sequence[Group], num_steps: int) -> dict[str, float]:
        """One optimiser step on these groups, the learning rate as far along as `version` is of `num_steps`."""
        examples = examples_of(groups, self._grpo, with_idle=self._grpo.kl_coef > 0)
        rows = pack(examples, self._config.micro_batch_tokens)
        lr = learning_rate(self._config, self.version, num_steps)
        self._optimizer.zero_grad()
        totals = _Totals()
        for row in rows:
            self._accumulate(row, totals)
        metrics = totals.metrics() | {
            "train/lr": lr,
            "train/packed_tokens": float(sum(len(row.token_ids) for row in rows)),
        }
        if rows:
            metrics["train/grad_norm"] = self._step(lr)
            metrics["train/skipped"] = float(not math.isfinite(metrics["train/grad_norm"]))
        self.version += 1
        return metrics

    def _step(self, lr: float) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained, self._config.max_grad_norm))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if math.isfinite(norm):
            self._optimizer.step()
        return norm

    def _accumulate(self, row: Row, totals: "_Totals") -> None:
        """Add one row's part of the loss to the gradients."""
        self.model.train()
        batch = self._batch(row)
        loss = batch_loss(batch, self._grpo)
        loss.total.backward()
        totals.add(
            loss=loss.total.detach(),
            clipped=loss.clipped_N.sum(),
            kl=loss.kl_N.sum(),
            mismatch=(batch.logprobs_N.detach() - batch.recorded_N).abs().sum(),
            mismatch_kl=mismatch_kl(batch).sum(),
            logprob=batch.logprobs_N.detach().sum(),
            tokens=len(row.targets),
        )

    def _batch(self, row: Row) -> Batch:
        """A row's trained tokens under the weights that the loss compares."""
        device = self.model.device
        logprobs_N = self.logprobs(row)
        present_N = logprobs_N.detach()
        recorded_N = torch.from_numpy(row.old_logprobs).to(device)
        unknown_N = recorded_N.isnan()
        anchored = self._anchored and bool(unknown_N.any())
        reference_N = self._reference(row) if anchored or self._grpo.kl_coef > 0 else None
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

    def _reference(self, row: Row) -> Tensor:
        with torch.no_grad(), self.model.disable_adapter():
            return self.logprobs(row)

    def logprobs(self, row: Row) -> Tensor:
        """Of a row's trained tokens, under the temperature they were sampled with."""
        device = self.model.device
        index_T = torch.arange(len(row.token_ids), device=device)
        ends_T = torch.from_numpy(row.ends).to(device)
        visible_TT = (index_T <= index_T[:, None]) & (index_T[:, None] < ends_T)
        sources, inverse = np.unique(row.sources, return_inverse=True)
        logits_SV = self.model(
            input_ids=torch.from_numpy(row.token_ids).long().to(device)[None],
            attention_mask=visible_TT[None, None],
            position_ids=torch.from_numpy(row.positions).long().to(device)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(sources).long().to(device),
        ).logits[0]
        logprobs_SV = torch.log_softmax(logits_SV.float() / self._temperature, dim=-1)
        targets_N = torch.from_numpy(row.targets).long().to(device)
        return logprobs_SV[torch.from_numpy(inverse).to(device), targets_N]

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
    """Sums over the rows of one update."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, **values: Tensor | int) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def metrics(self) -> dict[str, float]:
        tokens = self._sums.get("tokens", 0.0)
        per_token = {
            "train/clip_fraction": "clipped",
            "train/kl": "kl",
            "train/logprob_mismatch": "mismatch",
            "train/mismatch_kl": "mismatch_kl",
            "train/mean_logprob": "logprob",
        }
        return {
            "train/loss": self._sums.get("loss", 0.0),
            "train/tokens": tokens,
            **{name: self._sums[key] / tokens for name, key in per_token.items() if tokens},
        }
