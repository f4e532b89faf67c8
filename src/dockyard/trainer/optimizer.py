"""AdamW in float32, whatever the number format of the trained weights.

A step is often smaller than the spacing of bfloat16 numbers and would be lost. So weights in a narrower format have a
float32 master copy, which the optimizer updates; the weights are that copy, rounded.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dockyard.config import TrainerConfig
from dockyard.trainer.attention import wide


class Optimizer:
    """Accumulates the gradients of an update, then takes a step."""

    def __init__(self, trained: Sequence[Tensor], config: TrainerConfig) -> None:
        self._trained = list(trained)
        self._masters = [_master(weight) for weight in self._trained]
        self._max_norm = config.max_grad_norm
        self._adam = torch.optim.AdamW(
            self._masters,
            lr=config.lr,
            betas=(0.9, config.adam_beta2),
            weight_decay=config.weight_decay,
            fused=(fused := self._trained[0].device.type == "cuda"),
        )
        # Allocated now rather than at the first step, so that free memory is measured without it.
        for master in self._masters:
            step = torch.zeros((), dtype=torch.float32, device=master.device if fused else "cpu")
            moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            self._adam.state[master] = {"step": step, **moments}

    def zero_grad(self) -> None:
        """Start a new sum of gradients."""
        self._adam.zero_grad()

    def add(self, grads: Sequence[Tensor]) -> None:
        """Add gradients to the sum. If memory runs out, none of them is added."""
        sums = [master.grad for master in self._masters]
        if any(total is None for total in sums):
            for master, grad in zip(self._masters, [wide(grad) for grad in grads], strict=True):
                master.grad = grad
            return
        for total, grad in zip(sums, grads, strict=True):
            assert total is not None
            total.add_(grad)  # in place, without new memory

    def step(self, lr: float) -> float:
        """Take a step along the clipped gradient and return its norm before clipping. Skip it if that is not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._max_norm))
        for group in self._adam.param_groups:
            group["lr"] = lr
        if math.isfinite(norm):
            self._adam.step()
            self._round()
        for master, _ in self._rounded():
            master.grad = None  # frees four bytes per weight for the engine
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The state that is not in the weights."""
        return {"adam": self._adam.state_dict(), "masters": [master.detach() for master, _ in self._rounded()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. The weights are restored separately."""
        self._adam.load_state_dict(state["adam"])  # also moves it to the device of the weights
        with torch.no_grad():
            for (master, _), saved in zip(self._rounded(), state["masters"], strict=True):
                master.copy_(saved)

    def _rounded(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of a float32 master copy and its weight."""
        pairs = zip(self._masters, self._trained, strict=True)
        return [(master, weight) for master, weight in pairs if master is not weight]

    @torch.no_grad()
    def _round(self) -> None:
        for master, weight in self._rounded():
            weight.copy_(master)


def _master(weight: Tensor) -> Tensor:
    copy = wide(weight)
    return weight if copy is weight else copy.detach().requires_grad_()
