"""Attention of a pass over several sequences at once, each to its own region of the pool.

The new tokens' keys and values are written first. Where a fused kernel knows sequences by where they begin, nothing
is copied; elsewhere each sequence is attended to by itself.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "dockyard"
"""Under which transformers knows it."""
_QUERIES = 1024
"""How many are compared with all keys at once where that takes a mask."""
_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Packed:
    """The new tokens of some sequences, one after the other, as the model takes them."""

    token_ids_1T: Tensor
    positions_1T: Tensor
    slots_T: Tensor
    """Where in the pool each token's keys and values go."""
    rows_3R: Tensor
    """Of each sequence: its first new token, where it begins in the pool, its length with the new tokens.

    The first of these has one more entry, the number of tokens, and so the others have one that means nothing.
    """
    limits: Tensor
    """On the CPU: at least the most new tokens and the most tokens that any sequence has, and a common prefix.

    So many tokens all sequences begin with, and so many keys and values of theirs in the pool are the same.
    """


def fused(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashAttention as torch has it takes this."""
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
    """Write the new keys and values; return what each new token gets from those it sees."""
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
    """Regions need not be adjacent: with lengths given, the kernel takes the bounds of keys as beginnings only."""
    bounds_R, starts_R, lengths_R = rows_3R
    max_q, max_k, _ = limits.tolist()
    return _aten._flash_attention_forward(
        *(q_THD, pool_2SGD[0], pool_2SGD[1], bounds_R, starts_R, max_q, max_k, 0.0, True, False),
        scale=scale,
        seqused_k=lengths_R[:-1],
    )[0]


def _gathered(q_RHD: Tensor, pool_2SGD: Tensor, rows_3R: Tensor, max_k: int, scale: float) -> Tensor:
    """One new token each: all sequences side by side in a copy. Nothing of it asks the GPU for a number."""
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
    """The query heads that share a key head become that head's query positions, so that nothing is copied."""
    _, starts, lengths = (numbers[: len(q_RHD)] for numbers in rows_3R.tolist())
    q_RGqD = q_RHD.unflatten(1, (pool_2SGD.shape[2], -1))
    num_own = len(starts) * (max(lengths) - num_shared)
    if num_shared + 2 * num_own < sum(lengths):  # what is copied is read and written
        return _over_prefix(q_RGqD, pool_2SGD, rows_3R, num_shared, scale).flatten(1, 2)
    keys_1GSD, values_1GSD = pool_2SGD.transpose(1, 2)[:, None]
    outs: list[Tensor] = []
    for q_1GqD, start, length in zip(q_RGqD.split(1), starts, lengths, strict=True):
        some = slice(start, start + length)
        outs.append(scaled_dot_product_attention(q_1GqD, keys_1GSD[:, :, some], values_1GSD[:, :, some], scale=scale))
    return torch.cat(outs).flatten(1, 2)


def _over_prefix(q_RGqD: Tensor, pool_2SGD: Tensor, rows_3R: Tensor, num_shared: int, scale: float) -> Tensor:
    """Attention to a common prefix, read once for all sequences, joined with attention to what each has of its own."""
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
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=added, scale=scale)


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
    """`attend` as one operation that the compiler does not look into."""
    return attend(q_THD, k_TGD, v_TGD, pool_2SGD, slots_T, rows_3R, limits, scale).contiguous()


@pool_attention.register_fake
def _(q_THD: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q_THD, memory_format=torch.contiguous_format)


def _for_transformers(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **more: Any
) -> tuple[Tensor, None]:
    """As transformers calls attention; the pool and where to look in it are what the layer was called with."""
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    attention = pool_attention if torch.compiler.is_compiling() else attend
    where = more["pool"], more["slots"], more["rows"], more["limits"]
    return attention(q_THD, k_TGD, v_TGD, *where, scaling)[None], None


AttentionInterface.register(NAME, _for_transformers)
