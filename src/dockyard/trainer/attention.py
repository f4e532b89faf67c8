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
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface

from dockyard.types import IntArray

NAME = "dockyard_rows"
"""Under which transformers knows it."""
_SQUARE = 2048
"""Tokens of a triangle from which cuDNN's plans pay."""
_PLAIN_QUERIES = 1024
"""How many are compared with all keys at once."""
_RECTANGLE = 8192**2
"""Scores of a rectangle, likewise: its shapes hardly ever come twice."""


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


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """What one block gives its queries."""

    out_QHD: Tensor
    lse_HQ: Tensor


class Kernel(Protocol):
    """Attention of queries to keys of one sequence, with the log-sum-exp of their scores; causal where it is square."""

    def forward(self, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, causal: bool) -> AttentionBlock: ...

    def backward(
        self, grad_QHD: Tensor, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, part: AttentionBlock, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...


_aten: Any = torch.ops.aten


def _heads_first(x_THD: Tensor) -> Tensor:
    return x_THD.transpose(0, 1)[None]


def _tokens_first(x_1HTD: Tensor) -> Tensor:
    return x_1HTD[0].transpose(0, 1)


class CuDNN:
    """The fastest on Hopper. It makes a plan for each shape, in 0.1 s, so that shapes are rounded up to a few.

    Queries past the end come to nothing; keys past the end are seen by them alone.
    """

    def forward(self, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, causal: bool) -> AttentionBlock:
        num, spare = len(q_QHD), rounded_up(len(q_QHD)) - len(q_QHD)
        q, k, v = (_heads_first(_longer(x, spare if causal or x is q_QHD else 0)) for x in (q_QHD, k_KGD, v_KGD))
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
        return AttentionBlock(_tokens_first(out)[:num], lse[0, :, :num, 0])

    def backward(
        self, grad_QHD: Tensor, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, part: AttentionBlock, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        spare = rounded_up(len(q_QHD)) - len(q_QHD)
        grad, q, out = (_heads_first(_longer(x, spare)) for x in (grad_QHD, q_QHD, part.out_QHD))
        k, v = (_heads_first(_longer(x, spare if causal else 0)) for x in (k_KGD, v_KGD))
        lse = pad(part.lse_HQ, (0, spare), value=torch.inf)[None, :, :, None]  # a probability of 0
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *(grad, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal)
        )
        dq, dk, dv = map(_tokens_first, grads)
        return dq[: len(q_QHD)], dk[: len(k_KGD)], dv[: len(k_KGD)]


def rounded_up(num_tokens: int) -> int:
    """One of 32 lengths to the octave."""
    step = max(128, 2 ** (num_tokens.bit_length() - 6))
    return -(-num_tokens // step) * step


def _longer(x_THD: Tensor, spare: int) -> Tensor:
    return pad(x_THD, (0, 0, 0, 0, 0, spare)) if spare else x_THD


class Flash:
    """FlashAttention as torch has it: no plans, any shape."""

    def forward(self, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, causal: bool) -> AttentionBlock:
        out, lse, *_ = _aten._flash_attention_forward(
            *(q_QHD, k_KGD, v_KGD, *self._bounds(q_QHD, k_KGD), 0.0, causal, False)
        )
        return AttentionBlock(out, lse)

    def backward(
        self, grad_QHD: Tensor, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, part: AttentionBlock, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.zeros(2, dtype=torch.uint64, device=q_QHD.device)
        return _aten._flash_attention_backward(
            *(grad_QHD, q_QHD, k_KGD, v_KGD, part.out_QHD, part.lse_HQ.contiguous(), *self._bounds(q_QHD, k_KGD)),
            *(0.0, causal, unused, unused[:0]),
        )

    def _bounds(self, q_QHD: Tensor, k_KGD: Tensor) -> tuple[Tensor, Tensor, int, int]:
        num_q, num_k = len(q_QHD), len(k_KGD)
        bounds = torch.tensor([[0, num_q], [0, num_k]], dtype=torch.int32).to(q_QHD.device, non_blocking=True)
        return bounds[0], bounds[1], num_q, num_k


class Cpu:
    """FlashAttention for CPUs, which knows no groups of heads."""

    def forward(self, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, causal: bool) -> AttentionBlock:
        groups = q_QHD.shape[1] // k_KGD.shape[1]
        q, k, v = _heads_first(q_QHD), *(_heads_first(x.repeat_interleave(groups, 1)) for x in (k_KGD, v_KGD))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return AttentionBlock(_tokens_first(out), lse[0])

    def backward(
        self, grad_QHD: Tensor, q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, part: AttentionBlock, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = q_QHD.shape[1] // k_KGD.shape[1]
        q, k, v = _heads_first(q_QHD), *(_heads_first(x.repeat_interleave(groups, 1)) for x in (k_KGD, v_KGD))
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_heads_first(grad_QHD), q, k, v, _heads_first(part.out_QHD), part.lse_HQ[None].contiguous(), 0.0, causal)
        )
        dq, dk, dv = map(_tokens_first, grads)
        return dq, dk.unflatten(1, (-1, groups)).sum(2), dv.unflatten(1, (-1, groups)).sum(2)


class Plain:
    """Matrix products and a softmax, for number formats that no fused kernel takes: float32 on a GPU."""

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


def _kernel(q_QHD: Tensor, num_keys: int, *, causal: bool) -> Kernel:
    if q_QHD.device.type == "cpu":
        return Cpu()
    if q_QHD.dtype not in (torch.bfloat16, torch.float16):
        return Plain()
    large = num_keys >= _SQUARE if causal else len(q_QHD) * num_keys >= _RECTANGLE
    return CuDNN() if large and q_QHD.shape[2] <= 128 else Flash()


@torch.library.custom_op("dockyard::row_attention", mutates_args=())
def row_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, row_blocks: Tensor) -> tuple[Tensor, Tensor]:
    """What each token gets from those it sees, and the log-sum-exp of its scores."""
    call = _Call.of(row_blocks)
    num, heads, _ = q_THD.shape
    if call.made:
        call.made.keep(call.layer, k_TGD, v_TGD)
    if call.is_one_sequence:
        part = _kernel(q_THD, num, causal=True).forward(q_THD, k_TGD, v_TGD, True)
        return part.out_QHD.contiguous(), part.lse_HQ.contiguous()
    out_THD = torch.zeros(q_THD.shape, dtype=torch.promote_types(q_THD.dtype, torch.float32), device=q_THD.device)
    lse_HT = torch.full((heads, num), -torch.inf, dtype=out_THD.dtype, device=q_THD.device)
    for start, stop, first, last in call.blocks:
        q, k, v = q_THD[start:stop], k_TGD[first:last], v_TGD[first:last]
        kernel = _kernel(q, last - first, causal=start == first)
        part = kernel.forward(q, k, v, start == first)
        _join(out_THD[start:stop], lse_HT[:, start:stop], part)
    if call.seen:
        k, v = call.seen.seen[call.layer]
        _join(out_THD, lse_HT, _kernel(q_THD, len(k), causal=False).forward(q_THD, k, v, False))
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
        kernel = _kernel(q_THD, len(q_THD), causal=True)
        dq, dk, dv = kernel.backward(grad_THD, q_THD, k_TGD, v_TGD, AttentionBlock(out_THD, lse_HT), True)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    sums = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q_THD, k_TGD, v_TGD)]
    for start, stop, first, last in call.blocks:
        q, k, v = q_THD[start:stop], k_TGD[first:last], v_TGD[first:last]
        part = AttentionBlock(out_THD[start:stop], lse_HT[:, start:stop])
        kernel = _kernel(q, last - first, causal=start == first)
        grads = kernel.backward(grad_THD[start:stop], q, k, v, part, start == first)
        for total, grad, rows in zip(sums, grads, ((start, stop), (first, last), (first, last)), strict=True):
            total[slice(*rows)] += grad
    if call.seen:
        k, v = call.seen.seen[call.layer]
        kernel = _kernel(q_THD, len(k), causal=False)
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
