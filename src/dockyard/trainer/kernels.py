"""The attention kernels of the trainer: one block of queries and keys, forward and backward."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from dockyard.engine.torch_internals import (
    cpu_flash_backward,
    cpu_flash_forward,
    cudnn_backward,
    cudnn_forward,
    flash_backward,
    flash_forward,
)

_SQUARE = 2048
"""Keys of a causal block from which on cuDNN's plans pay."""
_RECTANGLE = 8192**2
"""Scores of any other block from which on they do: its shapes hardly ever repeat."""
_PLAIN_QUERIES = 1024
"""Queries that `Plain` compares with all keys at once."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """The result of one block: the output of its queries and the log-sum-exp of their scores."""

    out_QHD: Tensor
    lse_HQ: Tensor


class Kernel(Protocol):
    """Attention of queries to keys, with the log-sum-exp of their scores. A causal block is square."""

    def forward(self, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, causal: bool) -> AttentionBlock: ...

    def backward(
        self, grad_QHD: Tensor, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, part: AttentionBlock, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def _heads_first(x_THD: Tensor) -> Tensor:
    return x_THD.transpose(0, 1)[None]


def _tokens_first(x_1HTD: Tensor) -> Tensor:
    return x_1HTD[0].transpose(0, 1)


class CuDNN:
    """cuDNN, the fastest on Hopper. It takes 0.1 s to plan for a new shape, so lengths are rounded up to a few.

    The padding has no effect: padded queries have a probability of 0, and only they see padded keys.
    """

    def forward(self, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, causal: bool) -> AttentionBlock:
        num, spare = len(q_QHD), rounded_up(len(q_QHD)) - len(q_QHD)
        q, k, v = (_heads_first(_longer(x, spare if causal or x is q_QHD else 0)) for x in (q_QHD, k_KGD, v_KGD))
        out, lse = cudnn_forward(q, k, v, causal=causal)
        return AttentionBlock(_tokens_first(out)[:num], lse[0, :, :num, 0])

    def backward(
        self, grad_QHD: Tensor, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, part: AttentionBlock, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        spare = rounded_up(len(q_QHD)) - len(q_QHD)
        grad, q, out = (_heads_first(_longer(x, spare)) for x in (grad_QHD, q_QHD, part.out_QHD))
        k, v = (_heads_first(_longer(x, spare if causal else 0)) for x in (k_KGD, v_KGD))
        lse = pad(part.lse_HQ, (0, spare), value=torch.inf)[None, :, :, None]  # a probability of 0
        dq, dk, dv = map(_tokens_first, cudnn_backward(grad, q, k, v, out, lse, causal=causal))
        return dq[: len(q_QHD)], dk[: len(k_KGD)], dv[: len(k_KGD)]


def rounded_up(num_tokens: int) -> int:
    """Round up to one of 32 lengths between a power of two and the next."""
    step = max(128, 2 ** (num_tokens.bit_length() - 6))
    return -(-num_tokens // step) * step


def _longer(x_THD: Tensor, spare: int) -> Tensor:
    return pad(x_THD, (0, 0, 0, 0, 0, spare)) if spare else x_THD


class Flash:
    """FlashAttention, as torch has it, which takes any shape without planning."""

    def forward(self, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, causal: bool) -> AttentionBlock:
        return AttentionBlock(*flash_forward(q_QHD, k_KGD, v_KGD, *self._bounds(q_QHD, k_KGD), causal=causal))

    def backward(
        self, grad_QHD: Tensor, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, part: AttentionBlock, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        bounds = self._bounds(q_QHD, k_KGD)
        return flash_backward(
            grad_QHD, q_QHD, k_KGD, v_KGD, part.out_QHD, part.lse_HQ.contiguous(), *bounds, causal=causal
        )

    def _bounds(self, q_QHD: Tensor, k_KGD: Tensor) -> tuple[Tensor, Tensor, int, int]:
        num_q, num_k = len(q_QHD), len(k_KGD)
        bounds = torch.tensor([[0, num_q], [0, num_k]], dtype=torch.int32).to(q_QHD.device, non_blocking=True)
        return bounds[0], bounds[1], num_q, num_k


class Cpu:
    """FlashAttention for CPUs. It does not share key heads between query heads, so they are repeated."""

    def forward(self, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, causal: bool) -> AttentionBlock:
        groups = q_QHD.shape[1] // k_KGD.shape[1]
        q, k, v = _heads_first(q_QHD), *(_heads_first(x.repeat_interleave(groups, 1)) for x in (k_KGD, v_KGD))
        out, lse = cpu_flash_forward(q, k, v, causal=causal)
        return AttentionBlock(_tokens_first(out), lse[0])

    def backward(
        self, grad_QHD: Tensor, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, part: AttentionBlock, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = q_QHD.shape[1] // k_KGD.shape[1]
        q, k, v = _heads_first(q_QHD), *(_heads_first(x.repeat_interleave(groups, 1)) for x in (k_KGD, v_KGD))
        grad, out = _heads_first(grad_QHD), _heads_first(part.out_QHD)
        grads = cpu_flash_backward(grad, q, k, v, out, part.lse_HQ[None].contiguous(), causal=causal)
        dq, dk, dv = map(_tokens_first, grads)
        return dq, dk.unflatten(1, (-1, groups)).sum(2), dv.unflatten(1, (-1, groups)).sum(2)


class Plain:
    """Matrix products and a softmax, for number formats without a fused kernel: float32 on a GPU."""

    def forward(self, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, causal: bool) -> AttentionBlock:
        k_HKD, v_HKD = self._all_heads(q_QHD, k_KGD, v_KGD)
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        for start in range(0, len(q_QHD), _PLAIN_QUERIES):
            scores_HqK = self._scores(q_QHD[start : start + _PLAIN_QUERIES].transpose(0, 1), k_HKD, start, causal)
            outs.append((scores_HqK.softmax(-1) @ v_HKD).transpose(0, 1))
            lses.append(scores_HqK.logsumexp(-1))
        return AttentionBlock(torch.cat(outs), torch.cat(lses, 1))

    def backward(
        self, grad_QHD: Tensor, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, part: AttentionBlock, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        k_HKD, v_HKD = self._all_heads(q_QHD, k_KGD, v_KGD)
        dqs: list[Tensor] = []
        dk_HKD, dv_HKD = torch.zeros_like(k_HKD), torch.zeros_like(v_HKD)
        for start in range(0, len(q_QHD), _PLAIN_QUERIES):
            some = slice(start, start + _PLAIN_QUERIES)
            q, grad, out = (x[some].transpose(0, 1) for x in (q_QHD, grad_QHD, part.out_QHD))
            probabilities_HqK = (self._scores(q, k_HKD, start, causal) - part.lse_HQ[:, some, None]).exp()
            dv_HKD += probabilities_HqK.transpose(1, 2) @ grad
            slope_HqK = grad @ v_HKD.transpose(1, 2) - (grad * out).sum(-1, keepdim=True)
            slope_HqK = probabilities_HqK * slope_HqK * q.shape[2] ** -0.5
            dqs.append((slope_HqK @ k_HKD).transpose(0, 1))
            dk_HKD += slope_HqK.transpose(1, 2) @ q
        groups = q_QHD.shape[1] // k_KGD.shape[1]
        dk, dv = (x.unflatten(0, (-1, groups)).sum(1).transpose(0, 1) for x in (dk_HKD, dv_HKD))
        return torch.cat(dqs), dk, dv

    def _all_heads(self, q_QHD: Tensor, *shared: Tensor) -> list[Tensor]:
        groups = q_QHD.shape[1] // shared[0].shape[1]
        return [x_KGD.transpose(0, 1).repeat_interleave(groups, 0) for x_KGD in shared]

    def _scores(self, q_HqD: Tensor, k_HKD: Tensor, start: int, causal: bool) -> Tensor:
        scores_HqK = q_HqD @ k_HKD.transpose(1, 2) * q_HqD.shape[2] ** -0.5
        if not causal:
            return scores_HqK
        keys_K = torch.arange(k_HKD.shape[1], device=q_HqD.device)
        queries_q1 = torch.arange(start, start + q_HqD.shape[1], device=q_HqD.device)[:, None]
        return scores_HqK.masked_fill(keys_K > queries_q1, -torch.inf)


def choose_kernel(q_QHD: Tensor, num_keys: int, *, causal: bool) -> Kernel:
    """The fastest kernel for a block of this shape and number format."""
    if q_QHD.device.type == "cpu":
        return Cpu()
    if q_QHD.dtype not in (torch.bfloat16, torch.float16):
        return Plain()
    large = num_keys >= _SQUARE if causal else len(q_QHD) * num_keys >= _RECTANGLE
    return CuDNN() if large and q_QHD.shape[2] <= 128 else Flash()
