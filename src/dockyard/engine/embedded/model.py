"""A causal language model whose layers keep keys and values in the pool of `kv`.

One pass computes several sequences, each attending to its own region. New keys and values are written first. The fused
kernel takes sequence offsets and needs no copies; without it, sequences are computed one by one. On a CPU small models
keep a second copy of their weights in oneDNN's blocked layout, which multiplies a few rows two to four times as fast
as MKL.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from dockyard.engine.embedded.kv import SCRATCH, KVPool
from dockyard.engine.torch_internals import (
    block_weight,
    blocked_linear,
    cpu_flash_forward,
    flash_forward,
    mark_dynamic,
    original_call,
    replace_call,
)
from dockyard.engine.weights import num_weights, worth_compiling
from dockyard.types import IntArray

NAME = "dockyard"
"""The name under which it is registered with transformers."""
_QUERIES = 1024
"""Queries that are compared with all keys at once if that needs a mask."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The new tokens of some sequences, concatenated, as the model takes them."""

    token_ids_1T: Tensor
    positions_1T: Tensor
    slots_T: Tensor
    """The place of each token's keys and values in the pool."""
    rows_3R: Tensor
    """Of each sequence: the index of its first new token, its start in the pool, its length with the new tokens.

    The first of these has one more entry, the number of tokens; the last entry of the others is unused.
    """
    limits: Tensor
    """On the CPU: upper bounds of the new tokens and of the length of any sequence, and the length of a common prefix.

    The keys and values of the common prefix are the same for all sequences.
    """


def fused(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's FlashAttention supports this device, number format and head size."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 256:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def attend(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    pool_2SGD: Tensor,
    slots_T: Tensor,
    rows_3R: Tensor,
    limits: Tensor,
    scale: float,
) -> Tensor:
    """Write the new keys and values to the pool, and return the attention output of each new token."""
    pool_2SGD[0].index_copy_(0, slots_T, k_TGD)
    pool_2SGD[1].index_copy_(0, slots_T, v_TGD)
    if fused(q_THD.device, q_THD.dtype, q_THD.shape[2]):
        return _flash(q_THD, pool_2SGD, rows_3R, limits, scale)
    if int(limits[0]) > 1:
        return _one_by_one(q_THD, pool_2SGD, rows_3R, scale)
    if q_THD.device.type == "cuda":
        return _gathered(q_THD, pool_2SGD, rows_3R, int(limits[1]), scale)
    return _one_token_each(q_THD, pool_2SGD, rows_3R, int(limits[2]), scale)


def _flash(q_THD: Tensor, pool_2SGD: Tensor, rows_3R: Tensor, limits: Tensor, scale: float) -> Tensor:
    """Attention over regions that need not be adjacent, by the fused kernel."""
    bounds_R, starts_R, lengths_R = rows_3R
    max_q, max_k, _ = limits.tolist()
    out_THD, _ = flash_forward(
        *(q_THD, pool_2SGD[0], pool_2SGD[1], bounds_R, starts_R, max_q, max_k),
        causal=True,
        scale=scale,
        k_lengths=lengths_R[:-1],
    )
    return out_THD


def _gathered(q_RHD: Tensor, pool_2SGD: Tensor, rows_3R: Tensor, max_k: int, scale: float) -> Tensor:
    """Attention of one new token each, over a padded copy of all sequences, without synchronising with the GPU."""
    heads = pool_2SGD.shape[2]
    starts_R1, lengths_R1 = rows_3R[1:, :-1, None].long()
    columns_K = torch.arange(max_k, device=q_RHD.device)
    seen_RK = columns_K < lengths_R1
    slots_RK = torch.where(seen_RK, starts_R1 + columns_K, 0)
    k_RGKD, v_RGKD = (pool_2SGD[index][slots_RK].transpose(1, 2) for index in (0, 1))
    mask_RGqK = seen_RK[:, None, None, :]
    out = scaled_dot_product_attention(
        q_RHD.unflatten(1, (heads, -1)), k_RGKD, v_RGKD, attn_mask=mask_RGqK, scale=scale
    )
    return out.flatten(1, 2)


def _one_token_each(q_RHD: Tensor, pool_2SGD: Tensor, rows_3R: Tensor, num_shared: int, scale: float) -> Tensor:
    """Attention of one new token each. Query heads that share a key head become query positions, to avoid copies."""
    _, starts, lengths = (numbers[: len(q_RHD)] for numbers in rows_3R.tolist())
    q_RGqD = q_RHD.unflatten(1, (pool_2SGD.shape[2], -1))
    num_own = len(starts) * (max(lengths) - num_shared)
    if num_shared + 2 * num_own < sum(lengths):  # a copy is read and written
        return _over_prefix(q_RGqD, pool_2SGD, rows_3R, num_shared, scale).flatten(1, 2)
    keys_1GSD, values_1GSD = pool_2SGD.transpose(1, 2)[:, None]
    outs: list[Tensor] = []
    for q_1GqD, start, length in zip(q_RGqD.split(1), starts, lengths, strict=True):
        some = slice(start, start + length)
        outs.append(scaled_dot_product_attention(q_1GqD, keys_1GSD[:, :, some], values_1GSD[:, :, some], scale=scale))
    return torch.cat(outs).flatten(1, 2)


def _over_prefix(q_RGqD: Tensor, pool_2SGD: Tensor, rows_3R: Tensor, num_shared: int, scale: float) -> Tensor:
    """Attention to a common prefix, read once for all sequences, combined with attention to the rest of each."""
    starts_R1, lengths_R1 = rows_3R[1:, :-1, None].long()
    first = int(starts_R1[0])
    prefix_2GPD = pool_2SGD[:, first : first + num_shared].transpose(1, 2)
    q_GND = q_RGqD.transpose(0, 1).flatten(1, 2)
    out_GND, lse_GN = _with_lse(q_GND[None], prefix_2GPD[0, None], prefix_2GPD[1, None], None, scale)
    shared_RGqD = out_GND[0].unflatten(1, (len(q_RGqD), -1)).transpose(0, 1)
    shared_RGq = lse_GN[0].unflatten(1, (len(q_RGqD), -1)).transpose(0, 1)

    columns_K = torch.arange(num_shared, int(lengths_R1.max()))
    seen_RK = columns_K < lengths_R1
    slots_N = torch.where(seen_RK, starts_R1 + columns_K, 0).flatten()
    k_RGKD, v_RGKD = (
        pool_SGD.index_select(0, slots_N).unflatten(0, seen_RK.shape).transpose(1, 2) for pool_SGD in pool_2SGD
    )
    own_RGqD, own_RGq = _with_lse(q_RGqD, k_RGKD, v_RGKD, seen_RK[:, None, None, :], scale)
    return torch.lerp(own_RGqD, shared_RGqD, torch.sigmoid(shared_RGq - own_RGq)[..., None].to(own_RGqD.dtype))


def _with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention on a CPU, and the log-sum-exp of each query's scores."""
    added = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return cpu_flash_forward(q, k, v, causal=False, added_mask=added, scale=scale)


def _one_by_one(q_THD: Tensor, pool_2SGD: Tensor, rows_3R: Tensor, scale: float) -> Tensor:
    bounds, starts, lengths = rows_3R.tolist()
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    for first, last, start, length in zip(bounds, bounds[1:], starts, lengths, strict=False):
        k_GKD, v_GKD = pool_2SGD[:, start : start + length].transpose(1, 2)
        _several_tokens(q_THD[first:last], k_GKD, v_GKD, out_THD[first:last], scale)
    return out_THD


def _several_tokens(q_QHD: Tensor, k_GKD: Tensor, v_GKD: Tensor, out_QHD: Tensor, scale: float) -> None:
    groups = q_QHD.shape[1] // len(k_GKD)
    q, k, v = q_QHD.transpose(0, 1)[None], *(x.repeat_interleave(groups, 0)[None] for x in (k_GKD, v_GKD))
    num, length = len(q_QHD), k_GKD.shape[1]
    if num == length:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        out_QHD.copy_(out[0].transpose(0, 1))
        return
    keys_K = torch.arange(length, device=q.device)
    for first in range(0, num, _QUERIES):
        some = slice(first, min(first + _QUERIES, num))
        seen = length - num + some.stop
        mask_QK = keys_K[:seen] <= keys_K[seen - (some.stop - some.start) : seen, None]
        out = scaled_dot_product_attention(
            q[:, :, some], k[:, :, :seen], v[:, :, :seen], attn_mask=mask_QK, scale=scale
        )
        out_QHD[some].copy_(out[0].transpose(0, 1))


@torch.library.custom_op("dockyard::pool_attention", mutates_args=("pool_2SGD",))
def pool_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    pool_2SGD: Tensor,
    slots_T: Tensor,
    rows_3R: Tensor,
    limits: Tensor,
    scale: float,
) -> Tensor:
    """`attend` as one operation that is opaque to the compiler."""
    return attend(q_THD, k_TGD, v_TGD, pool_2SGD, slots_T, rows_3R, limits, scale).contiguous()


@pool_attention.register_fake
def _(q_THD: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q_THD, memory_format=torch.contiguous_format)


def _for_transformers(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **more: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it. The layer is called with the pool and the places in it."""
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    attention = pool_attention if torch.compiler.is_compiling() else attend
    where = more["pool"], more["slots"], more["rows"], more["limits"]
    return attention(q_THD, k_TGD, v_TGD, *where, scaling)[None], None


AttentionInterface.register(NAME, _for_transformers)


_MOST_WEIGHTS = 10**9
"""The largest model that is packed, which takes 4 GB more."""


def worth_packing(model: Any) -> bool:
    """Whether this is a small float32 model on a CPU that torch supports with oneDNN."""
    on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    return on_cpu and torch.backends.mkldnn.is_available() and num_weights(model) < _MOST_WEIGHTS


@torch.no_grad()
def pack_linears(model: Any) -> None:
    """Replace how the linear layers of a model are called, with blocked copies of their current weights.

    This must be repeated whenever the weights change.
    """
    inside = {id(part) for module in model.modules() if isinstance(module, LoraLinear) for part in module.modules()}
    for module in model.modules():
        if isinstance(module, LoraLinear) and _is_plain(module):
            base: Any = module.get_base_layer()
            _pack(module, _merged(module), base.bias)
        elif isinstance(module, nn.Linear) and id(module) not in inside:
            _pack(module, module.weight, module.bias)


def _merged(module: Any) -> Tensor:
    weight = module.get_base_layer().weight
    for name in module.active_adapters:
        up, down = module.lora_B[name].weight, module.lora_A[name].weight
        weight = torch.addmm(weight, up, down, alpha=module.scaling[name])
    return weight


def _pack(module: Any, weight: Tensor, bias: Any) -> None:
    replace_call(module, partial(_linear, block_weight(weight), bias))


def _is_plain(module: Any) -> bool:
    """Whether the layer computes `W x + scaling * B A x` and nothing else."""
    return type(module.get_base_layer()) is nn.Linear and not module.lora_variant and not module.merged


def _linear(blocked: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return blocked_linear(x, blocked, bias)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence that are computed in one pass."""

    token_ids: IntArray
    num_known: int
    """The number of tokens before them, whose keys and values are in the pool."""
    start: int
    """The start of the sequence in the pool."""


_PADDING = Piece(np.zeros(1, np.int32), 0, SCRATCH.start)


def pack(pieces: Sequence[Piece], device: torch.device) -> Packed:
    """Pack pieces for one pass."""
    if device.type == "cuda":
        pieces = [*pieces, _PADDING]  # the compiler specialises on size 1, so there are always at least two
    counts = [len(piece.token_ids) for piece in pieces]
    lengths = [piece.num_known + count for piece, count in zip(pieces, counts, strict=True)]
    starts = [piece.start for piece in pieces]
    positions = np.concatenate([np.arange(piece.num_known, end) for piece, end in zip(pieces, lengths, strict=True)])
    rows = np.array([[0, *np.cumsum(counts)], [*starts, 0], [*lengths, 0]], dtype=np.int32)
    token_ids = np.concatenate([piece.token_ids for piece in pieces]).astype(np.int64)
    return Packed(
        torch.from_numpy(token_ids).to(device)[None],
        torch.from_numpy(positions).to(device)[None],
        torch.from_numpy(positions + np.repeat(starts, counts)).to(device),
        torch.from_numpy(rows).to(device),
        torch.tensor([max(counts), max(lengths), 0]),
    )


def _run_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return original_call(layer)(*args, **kwargs)


class PooledModel:
    """Replaces how a model's decoder layers are called: each gets its layer of the pool."""

    def __init__(self, model: Any, pool: KVPool) -> None:
        self.pool = pool
        self._packs = worth_packing(model)
        self._compiled = worth_compiling(model)
        self._run_layer: Any = torch.compile(_run_layer) if self._compiled else _run_layer
        self.take_over(model)

    def take_over(self, model: Any) -> None:
        """Run this model from now on, with or without adapters."""
        _narrow_adapters(model)
        self.model = model
        causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        causal.set_attn_implementation(NAME)
        self._causal = causal
        if self._packs:
            pack_linears(causal)
        for index, layer in enumerate(causal.get_decoder().layers):
            replace_call(layer, partial(self._call, index, layer))

    @property
    def addresses(self) -> tuple[int, ...]:
        """The memory addresses of all weights."""
        return tuple(parameter.data_ptr() for parameter in self.model.parameters())

    def logits(self, packed: Packed, wanted_N: Tensor | None = None) -> Tensor:
        """The logits of these tokens of a pass, or of all. Their keys and values are in the pool afterwards."""
        return self._causal(
            input_ids=packed.token_ids_1T,
            position_ids=packed.positions_1T,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=0 if wanted_N is None else wanted_N,
            slots=packed.slots_T,
            rows=packed.rows_3R,
            limits=packed.limits,
        ).logits[0]

    def _call(self, index: int, layer: Any, hidden_1TD: Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs["pool"] = self.pool.layers[index]
        if self._compiled:
            _mark_lengths(hidden_1TD, kwargs)
        return self._run_layer(layer, hidden_1TD, *args, **kwargs)


def _mark_lengths(hidden_1TD: Tensor, kwargs: dict[str, Any]) -> None:
    """Tell the compiler which sizes differ from call to call; otherwise it would compile for each."""
    mark_dynamic(kwargs["slots"], 0)
    by_token = (hidden_1TD, kwargs.get("position_ids"), *(kwargs.get("position_embeddings") or ()))
    for value in (*by_token, kwargs["rows"], kwargs["pool"]):
        if value is not None:
            mark_dynamic(value, 1)


def _narrow_adapters(model: Any) -> None:
    """Convert adapters to the model's own number format, in which they are multiplied; training uses a wider one."""
    for name, parameter in model.named_parameters():
        if "lora_" in name and parameter.dtype != model.dtype:
            parameter.data = parameter.data.to(model.dtype)
