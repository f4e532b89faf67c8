"""Attention of a packed row, put together from blocks that ordinary attention kernels know.

A row is a trie in depth-first order (`rl/pack.py`). A run of tokens without a branching sees itself causally, and all
that begins with it sees it whole: a triangle and a rectangle. What a token gets from several blocks is joined by their
log-sum-exps, and the gradient of each block is the kernel's own, taken at the joined output. Nothing is approximated.

A row over a trunk (`rl/trees.py`) sees one rectangle more, whose keys and values another pass left behind.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from dockyard.trainer.kernels import AttentionBlock, choose_kernel
from dockyard.types import IntArray

NAME = "dockyard_rows"
"""Under which transformers knows it."""


def blocks_of(positions: IntArray, ends: IntArray) -> NDArray[np.int64]:
    """A row's blocks as `[query start, query stop, key start, key stop]`, each run's triangle before its rectangle."""
    goes_on = (positions[1:] == positions[:-1] + 1) & (ends[1:] == ends[:-1])
    starts = np.concatenate([[0], np.flatnonzero(~goes_on) + 1]).astype(np.int64)
    stops = np.append(starts[1:], len(positions))
    blocks: list[tuple[int, int, int, int]] = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        blocks.append((start, stop, start, stop))
        if ends[start] > stop:
            blocks.append((stop, int(ends[start]), start, stop))
    return np.array(blocks, dtype=np.int64)


@dataclass(slots=True, eq=False)
class PrefixKV:
    """What all rows of a tree see: keys and values by layer, and the gradients that the rows leave for them.

    They go past autograd, from one call of attention to another: no row's graph holds on to the trunk's.
    """

    num_tokens: int
    number: int
    seen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, tuple[Tensor, Tensor]])
    grads: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, tuple[Tensor, Tensor]])

    def keep(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> None:
        # Copies: what a compiled layer has no use for any more is written over.
        self.seen[layer] = (k_TGD[: self.num_tokens].clone(), v_TGD[: self.num_tokens].clone())

    def add(self, layer: int, dk_PGD: Tensor, dv_PGD: Tensor) -> None:
        """What a row asks of the trunk, summed in float32 or better."""
        if layer not in self.grads:
            self.grads[layer] = (wide(dk_PGD), wide(dv_PGD))
        else:
            for total, grad in zip(self.grads[layer], (dk_PGD, dv_PGD), strict=True):
                total += grad


_TRUNKS: dict[int, PrefixKV] = {}
_NUMBERS = count(1)


@contextmanager
def new_trunk(num_tokens: int) -> Iterator[PrefixKV]:
    """One that rows can name for as long as this lasts."""
    trunk = PrefixKV(num_tokens, next(_NUMBERS))
    _TRUNKS[trunk.number] = trunk
    try:
        yield trunk
    finally:
        del _TRUNKS[trunk.number]


@dataclass(frozen=True, slots=True)
class _Call:
    """What one layer's attention is to do, as its `row_blocks` say: the compiler knows tensors by their shape alone.

    The last of the blocks is an empty one: its third number is the layer, its fourth the trunk, negative for the pass
    that makes it and 0 for none.
    """

    blocks: list[list[int]]
    layer: int
    made: PrefixKV | None
    seen: PrefixKV | None

    @classmethod
    def of(cls, row_blocks: Tensor) -> Self:
        *blocks, (_, _, layer, number) = row_blocks.tolist()
        return cls(blocks, layer, _TRUNKS.get(-number), _TRUNKS.get(number))

    @property
    def is_one_sequence(self) -> bool:
        return len(self.blocks) == 1 and self.seen is None


def as_row_blocks(blocks: NDArray[np.int64], trunk: PrefixKV | None, *, made: bool) -> Tensor:
    """A row's blocks, and which trunk it makes or sees."""
    number = 0 if trunk is None else -trunk.number if made else trunk.number
    return torch.from_numpy(np.concatenate([blocks, [[0, 0, 0, number]]]))


def in_layer(row_blocks: Tensor, index: int) -> Tensor:
    """The same for one layer."""
    own = row_blocks.clone()
    own[-1, 2] = index
    return own


@torch.library.custom_op("dockyard::row_attention", mutates_args=())
def row_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, row_blocks: Tensor) -> tuple[Tensor, Tensor]:
    """What each token gets from those it sees, and the log-sum-exp of its scores."""
    call = _Call.of(row_blocks)
    num, heads, _ = q_THD.shape
    if call.made:
        call.made.keep(call.layer, k_TGD, v_TGD)
    if call.is_one_sequence:
        part = choose_kernel(q_THD, num, causal=True).forward(q_THD, k_TGD, v_TGD, True)
        return part.out_QHD.contiguous(), part.lse_HQ.contiguous()
    out_THD = torch.zeros(q_THD.shape, dtype=torch.promote_types(q_THD.dtype, torch.float32), device=q_THD.device)
    lse_HT = torch.full((heads, num), -torch.inf, dtype=out_THD.dtype, device=q_THD.device)
    for start, stop, first, last in call.blocks:
        q, k, v = q_THD[start:stop], k_TGD[first:last], v_TGD[first:last]
        kernel = choose_kernel(q, last - first, causal=start == first)
        part = kernel.forward(q, k, v, start == first)
        _join(out_THD[start:stop], lse_HT[:, start:stop], part)
    if call.seen:
        k, v = call.seen.seen[call.layer]
        _join(out_THD, lse_HT, choose_kernel(q_THD, len(k), causal=False).forward(q_THD, k, v, False))
    return out_THD.to(q_THD.dtype), lse_HT


def _join(out_QHD: Tensor, lse_HQ: Tensor, part: AttentionBlock) -> None:
    """Add a part to what its queries have so far."""
    joined_HQ = torch.logaddexp(lse_HQ, part.lse_HQ.to(lse_HQ.dtype))
    old_QH1, new_QH1 = ((lse - joined_HQ).exp().T[:, :, None] for lse in (lse_HQ, part.lse_HQ))
    out_QHD.mul_(old_QH1).addcmul_(part.out_QHD.to(out_QHD.dtype), new_QH1)
    lse_HQ.copy_(joined_HQ)


@row_attention.register_fake
def _(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, row_blocks: Tensor) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q_THD.dtype, torch.float32)
    return torch.empty_like(q_THD, memory_format=torch.contiguous_format), q_THD.new_empty(
        (q_THD.shape[1], q_THD.shape[0]), dtype=lse_dtype
    )


@torch.library.custom_op("dockyard::row_attention_backward", mutates_args=())
def row_attention_backward(
    grad_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_THD: Tensor, lse_HT: Tensor, row_blocks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Each block's own gradient, with the probabilities that the joined log-sum-exps give."""
    call = _Call.of(row_blocks)
    if call.is_one_sequence and not (call.made and call.made.grads):
        kernel = choose_kernel(q_THD, len(q_THD), causal=True)
        dq, dk, dv = kernel.backward(grad_THD, q_THD, k_TGD, v_TGD, AttentionBlock(out_THD, lse_HT), True)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    sums = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q_THD, k_TGD, v_TGD)]
    for start, stop, first, last in call.blocks:
        q, k, v = q_THD[start:stop], k_TGD[first:last], v_TGD[first:last]
        part = AttentionBlock(out_THD[start:stop], lse_HT[:, start:stop])
        kernel = choose_kernel(q, last - first, causal=start == first)
        grads = kernel.backward(grad_THD[start:stop], q, k, v, part, start == first)
        for total, grad, rows in zip(sums, grads, ((start, stop), (first, last), (first, last)), strict=True):
            total[slice(*rows)] += grad
    if call.seen:
        k, v = call.seen.seen[call.layer]
        kernel = choose_kernel(q_THD, len(k), causal=False)
        dq, *asked = kernel.backward(grad_THD, q_THD, k, v, AttentionBlock(out_THD, lse_HT), False)
        sums[0] += dq
        call.seen.add(call.layer, *asked)
    if call.made and call.made.grads:
        for total, asked in zip(sums[1:], call.made.grads.pop(call.layer), strict=True):
            total[: len(asked)] += asked
    dq, dk, dv = (total.to(q_THD.dtype) for total in sums)
    return dq, dk, dv


@row_attention_backward.register_fake
def _(
    grad_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_THD: Tensor, lse_HT: Tensor, row_blocks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_TGD, v_TGD))
    return dq, dk, dv


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, blocks = inputs
    ctx.save_for_backward(q, k, v, *output, blocks)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, blocks = ctx.saved_tensors
    return *row_attention_backward(grad, q, k, v, out, lse, blocks), None


row_attention.register_autograd(_backward, setup_context=_remember)


_NOT_COMPUTED = ("softcap", "s_aux", "sliding_window")
"""What some families ask of attention."""
_watching: list[bool] | None = None


def _for_transformers(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **more: Any
) -> tuple[Tensor, None]:
    """As `transformers` calls attention; `row_blocks` is what the model was called with, or else it is one sequence."""
    blocks = more.get("row_blocks")
    if _watching is not None:
        known = blocks is not None and attention_mask is None
        _watching.append(known and all(more.get(name) is None for name in _NOT_COMPUTED))
    if blocks is None:
        blocks = torch.tensor([[0, query.shape[2]] * 2, [0] * 4])
    q_THD = query[0].transpose(0, 1)
    if (factor := scaling * query.shape[-1] ** 0.5) != 1:  # the kernels scale by the usual factor themselves
        q_THD = q_THD * factor
    out_THD, _ = row_attention(q_THD, key[0].transpose(0, 1), value[0].transpose(0, 1), blocks)
    return out_THD[None], None


@contextmanager
def watched() -> Generator[list[bool]]:
    """For each call of attention meanwhile, whether it was told of the row, and asked for nothing else."""
    global _watching
    _watching = found = list[bool]()
    try:
        yield found
    finally:
        _watching = None


def wide(x: Tensor) -> Tensor:
    """In float32 or better: small numbers added one by one would be lost in a narrower format."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


AttentionInterface.register(NAME, _for_transformers)
