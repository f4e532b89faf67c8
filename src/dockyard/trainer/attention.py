"""Attention of a packed row, computed block by block with ordinary attention kernels.

A row holds several sequences as a trie in depth-first order (`rl/pack.py`): tokens that sequences begin with in common
are there once. A run is a stretch of tokens without a branch. It attends causally to itself, and everything that
continues it attends to all of it. With the sequences ABC, ABD and AE, of the runs A to E:

    keys     P     A  B  C  D  E
    queries
       A     #     *
       B     #     #  *              *  the causal block of a run with itself
       C     #     #  #  *           #  a full block, one in each column: the runs B to E attend to all of A,
       D     #     #  #     *           C and D attend to all of B, and everything attends to all of P (see below)
       E     #     #           *

The results of a token's blocks are combined by their log-sum-exps. The gradient of a block is the kernel's own, taken
at the combined output. Nothing is approximated.

The rows of a tree (`rl/trees.py`) continue a common prefix P, which is computed once, in a pass of its own. That pass
leaves its keys and values of each layer in a `PrefixKV`, which the rows attend to as one more full block, and the rows
leave there the gradients of these keys and values for the backward pass of the prefix:

    forward    prefix pass --keys, values--> PrefixKV --> rows
    backward   prefix pass <--gradients----- PrefixKV <-- rows, which run first

They bypass autograd, so that no row's graph holds on to the prefix's.

The compiler specialises on numbers but not on the contents of tensors, so everything that a call of attention needs
to know arrives in two small integer tensors on the CPU: `row_blocks` and `row_call` (see `RowLayout`).
"""

import itertools
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from dockyard.trainer.kernels import AttentionBlock, choose_kernel
from dockyard.types import IntArray

NAME = "dockyard_rows"
"""The name under which it is registered with transformers."""


def blocks_of(positions: IntArray, ends: IntArray) -> NDArray[np.int64]:
    """A row's blocks as `[query start, query stop, key start, key stop]`: each run's causal, then its full block."""
    continues = (positions[1:] == positions[:-1] + 1) & (ends[1:] == ends[:-1])
    starts = np.concatenate([[0], np.flatnonzero(~continues) + 1]).astype(np.int64)
    stops = np.append(starts[1:], len(positions))
    blocks: list[tuple[int, int, int, int]] = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        blocks.append((start, stop, start, stop))
        if ends[start] > stop:
            blocks.append((stop, int(ends[start]), start, stop))
    return np.array(blocks, dtype=np.int64)


type KeysValues = tuple[Tensor, Tensor]


@dataclass(slots=True, eq=False)
class PrefixKV:
    """The keys and values of a prefix by layer, and the gradients that rows leave for them."""

    num_tokens: int
    number: int
    """By which calls of attention find it."""
    _keys_values: dict[int, KeysValues] = field(default_factory=dict[int, KeysValues])
    _grads: dict[int, KeysValues] = field(default_factory=dict[int, KeysValues])

    def store(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> None:
        # Copies: a compiled layer overwrites memory that it does not need any more.
        self._keys_values[layer] = (k_TGD[: self.num_tokens].clone(), v_TGD[: self.num_tokens].clone())

    def keys_values(self, layer: int) -> KeysValues:
        return self._keys_values[layer]

    def add_grads(self, layer: int, dk_PGD: Tensor, dv_PGD: Tensor) -> None:
        """Add a row's gradients, in float32 or better."""
        if layer not in self._grads:
            self._grads[layer] = (wide(dk_PGD), wide(dv_PGD))
        else:
            for total, grad in zip(self._grads[layer], (dk_PGD, dv_PGD), strict=True):
                total += grad

    @property
    def has_grads(self) -> bool:
        """Whether rows have left gradients in any layer whose gradients have not been taken."""
        return bool(self._grads)

    def take_grads(self, layer: int) -> KeysValues:
        """The sum of the rows' gradients, which is removed."""
        return self._grads.pop(layer)


_NO_PREFIX = 0


class _Context:
    """What calls of attention share: prefixes that are in use, by number, and whether calls are being watched.

    Several policies may be trained in one process, each in its own thread: numbers are unique, and one thread watches
    at a time.
    """

    def __init__(self) -> None:
        self.prefixes: dict[int, PrefixKV] = {}
        self.watched: list[bool] | None = None
        self.watching = threading.Lock()
        self._numbers = itertools.count(_NO_PREFIX + 1)

    def new_prefix(self, num_tokens: int) -> PrefixKV:
        number = next(self._numbers)
        prefix = self.prefixes[number] = PrefixKV(num_tokens, number)
        return prefix


_CONTEXT = _Context()


@contextmanager
def open_prefix(num_tokens: int) -> Iterator[PrefixKV]:
    """A new prefix that passes can compute and attend to within this block."""
    prefix = _CONTEXT.new_prefix(num_tokens)
    try:
        yield prefix
    finally:
        del _CONTEXT.prefixes[prefix.number]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What every layer is called with besides hidden states. Both tensors are on the CPU."""

    row_blocks: Tensor
    """The blocks of the row (`blocks_of`), then an empty block: the compiler would specialise on a single line."""
    row_call: Tensor
    """Three numbers: the layer, the prefix (0 for none), and 1 if this pass computes the prefix."""

    @classmethod
    def of(cls, blocks: NDArray[np.int64], prefix: PrefixKV | None = None, *, computes_prefix: bool = False) -> Self:
        number = prefix.number if prefix else _NO_PREFIX
        lines = np.concatenate([blocks, np.zeros((1, 4), dtype=np.int64)])
        return cls(torch.from_numpy(lines), torch.tensor([0, number, int(computes_prefix)]))

    @classmethod
    def one_sequence(cls, num_tokens: int) -> Self:
        """The layout of a plain sequence without a prefix."""
        return cls(torch.tensor([[0, num_tokens] * 2, [0] * 4]), torch.tensor([0, _NO_PREFIX, 0]))

    @property
    def arguments(self) -> dict[str, Tensor]:
        """The keyword arguments by which transformers passes it to attention."""
        return {"row_blocks": self.row_blocks, "row_call": self.row_call}


def in_layer(row_call: Tensor, layer: int) -> Tensor:
    """The same `row_call` for this layer."""
    own = row_call.clone()
    own[0] = layer
    return own


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """What one layer's attention has to do."""

    blocks: list[list[int]]
    layer: int
    computed: PrefixKV | None
    """The prefix whose keys and values this pass computes."""
    prefix: PrefixKV | None
    """The prefix that the row attends to."""

    @classmethod
    def of(cls, row_blocks: Tensor, row_call: Tensor) -> Self:
        *blocks, _ = row_blocks.tolist()
        layer, number, computes_prefix = row_call.tolist()
        prefix = _CONTEXT.prefixes.get(number)
        return cls(
            blocks=blocks,
            layer=layer,
            computed=prefix if computes_prefix else None,
            prefix=None if computes_prefix else prefix,
        )

    @property
    def is_one_sequence(self) -> bool:
        return len(self.blocks) == 1 and self.prefix is None


@torch.library.custom_op("dockyard::row_attention", mutates_args=())
def row_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, row_blocks: Tensor, row_call: Tensor
) -> tuple[Tensor, Tensor]:
    """The output of each token, and the log-sum-exp of its scores."""
    call = _LayerCall.of(row_blocks, row_call)
    num, heads, _ = q_THD.shape
    if call.computed:
        call.computed.store(call.layer, k_TGD, v_TGD)
    if call.is_one_sequence:
        part = choose_kernel(q_THD, num, causal=True).forward(q_THD, k_TGD, v_TGD, True)
        return part.out_QHD.contiguous(), part.lse_HQ.contiguous()
    out_THD = torch.zeros(q_THD.shape, dtype=torch.promote_types(q_THD.dtype, torch.float32), device=q_THD.device)
    lse_HT = torch.full((heads, num), -torch.inf, dtype=out_THD.dtype, device=q_THD.device)
    for start, stop, first, last in call.blocks:
        q, k, v = q_THD[start:stop], k_TGD[first:last], v_TGD[first:last]
        kernel = choose_kernel(q, last - first, causal=start == first)
        part = kernel.forward(q, k, v, start == first)
        _combine(out_THD[start:stop], lse_HT[:, start:stop], part)
    if call.prefix:
        k, v = call.prefix.keys_values(call.layer)
        _combine(out_THD, lse_HT, choose_kernel(q_THD, len(k), causal=False).forward(q_THD, k, v, False))
    return out_THD.to(q_THD.dtype), lse_HT


def _combine(out_QHD: Tensor, lse_HQ: Tensor, part: AttentionBlock) -> None:
    """Combine the result of a block with that of its queries so far, in place."""
    combined_HQ = torch.logaddexp(lse_HQ, part.lse_HQ.to(lse_HQ.dtype))
    old_QH1, new_QH1 = ((lse - combined_HQ).exp().T[:, :, None] for lse in (lse_HQ, part.lse_HQ))
    out_QHD.mul_(old_QH1).addcmul_(part.out_QHD.to(out_QHD.dtype), new_QH1)
    lse_HQ.copy_(combined_HQ)


@row_attention.register_fake
def _(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, row_blocks: Tensor, row_call: Tensor) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q_THD.dtype, torch.float32)
    return torch.empty_like(q_THD, memory_format=torch.contiguous_format), q_THD.new_empty(
        (q_THD.shape[1], q_THD.shape[0]), dtype=lse_dtype
    )


@torch.library.custom_op("dockyard::row_attention_backward", mutates_args=())
def row_attention_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    row_blocks: Tensor,
    row_call: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of each block's own gradients, whose probabilities follow from the combined log-sum-exps."""
    call = _LayerCall.of(row_blocks, row_call)
    asked_by_rows = bool(call.computed and call.computed.has_grads)
    if call.is_one_sequence and not asked_by_rows:
        kernel = choose_kernel(q_THD, len(q_THD), causal=True)
        dq, dk, dv = kernel.backward(grad_THD, q_THD, k_TGD, v_TGD, AttentionBlock(out_THD, lse_HT), True)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    dtype = torch.promote_types(q_THD.dtype, torch.float32)
    sums = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q_THD, k_TGD, v_TGD)]
    for start, stop, first, last in call.blocks:
        q, k, v = q_THD[start:stop], k_TGD[first:last], v_TGD[first:last]
        part = AttentionBlock(out_THD[start:stop], lse_HT[:, start:stop])
        kernel = choose_kernel(q, last - first, causal=start == first)
        grads = kernel.backward(grad_THD[start:stop], q, k, v, part, start == first)
        for total, grad, rows in zip(sums, grads, ((start, stop), (first, last), (first, last)), strict=True):
            total[slice(*rows)] += grad
    if call.prefix:
        k, v = call.prefix.keys_values(call.layer)
        kernel = choose_kernel(q_THD, len(k), causal=False)
        dq, dk, dv = kernel.backward(grad_THD, q_THD, k, v, AttentionBlock(out_THD, lse_HT), False)
        sums[0] += dq
        call.prefix.add_grads(call.layer, dk, dv)
    if call.computed and asked_by_rows:
        for total, grad in zip(sums[1:], call.computed.take_grads(call.layer), strict=True):
            total[: len(grad)] += grad
    dq, dk, dv = (total.to(q_THD.dtype) for total in sums)
    return dq, dk, dv


@row_attention_backward.register_fake
def _(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    row_blocks: Tensor,
    row_call: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_TGD, v_TGD))
    return dq, dk, dv


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, row_blocks, row_call = inputs
    ctx.save_for_backward(q, k, v, *output, row_blocks, row_call)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *row_attention_backward(grad, *ctx.saved_tensors), None, None


row_attention.register_autograd(_backward, setup_context=_remember)


_NOT_COMPUTED = ("softcap", "s_aux", "sliding_window")
"""Arguments of some model families that change what attention computes."""


def _for_transformers(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **more: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it. Without a `RowLayout` the tokens are one sequence."""
    blocks, call = more.get("row_blocks"), more.get("row_call")
    if _CONTEXT.watched is not None:
        known = blocks is not None and attention_mask is None
        _CONTEXT.watched.append(known and all(more.get(name) is None for name in _NOT_COMPUTED))
    if blocks is None or call is None:
        layout = RowLayout.one_sequence(query.shape[2])
        blocks, call = layout.row_blocks, layout.row_call
    q_THD = query[0].transpose(0, 1)
    if (factor := scaling * query.shape[-1] ** 0.5) != 1:  # the kernels apply the usual factor themselves
        q_THD = q_THD * factor
    out_THD, _ = row_attention(q_THD, key[0].transpose(0, 1), value[0].transpose(0, 1), blocks, call)
    return out_THD[None], None


@contextmanager
def watched() -> Generator[list[bool]]:
    """Collect, for each call of attention in this block, whether it got the row's layout and nothing it ignores."""
    with _CONTEXT.watching:
        _CONTEXT.watched = found = list[bool]()
        try:
            yield found
        finally:
            _CONTEXT.watched = None


def wide(x: Tensor) -> Tensor:
    """Convert to float32 or better: in a narrower format a sum would lose small terms."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


AttentionInterface.register(NAME, _for_transformers)
