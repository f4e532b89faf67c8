"""Every use of torch that is not part of its public API, for the embedded engine and the trainer.

A torch release may change any of them without notice. `tests/train/test_torch_internals.py` names the one that broke,
and checks that no other file uses torch's internals.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as _partitioner

_aten: Any = torch.ops.aten
_mkldnn: Any = torch.ops.mkldnn


def flash_forward(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    max_q: int,
    max_k: int,
    *,
    causal: bool,
    scale: float | None = None,
    k_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention on a GPU: output and log-sum-exp of several sequences that lie one after the other.

    With `k_lengths`, `k_bounds` are only where the keys of each sequence begin, and need not be adjacent.
    """
    out, lse, *_ = _aten._flash_attention_forward(
        *(q_THD, k_TGD, v_TGD, q_bounds, k_bounds, max_q, max_k, 0.0, causal, False), scale=scale, seqused_k=k_lengths
    )
    return out, lse


def flash_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    max_q: int,
    max_k: int,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `flash_forward`."""
    unused = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)  # the random state of a dropout that is off
    return _aten._flash_attention_backward(
        *(grad_THD, q_THD, k_TGD, v_TGD, out_THD, lse_HT, q_bounds, k_bounds, max_q, max_k),
        *(0.0, causal, unused, unused[:0]),
    )


def cudnn_forward(q_1HTD: Tensor, k_1GTD: Tensor, v_1GTD: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """cuDNN's attention: output and log-sum-exp."""
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q_1HTD, k_1GTD, v_1GTD, None, True, 0.0, causal, False)
    return out, lse


def cudnn_backward(
    grad_1HTD: Tensor,
    q_1HTD: Tensor,
    k_1GTD: Tensor,
    v_1GTD: Tensor,
    out_1HTD: Tensor,
    lse_1HT1: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `cudnn_forward`."""
    unused = torch.zeros((), dtype=torch.int64, device=q_1HTD.device)  # the random state of a dropout that is off
    return _aten._scaled_dot_product_cudnn_attention_backward(
        *(grad_1HTD, q_1HTD, k_1GTD, v_1GTD, out_1HTD, lse_1HT1, unused, unused, None, None, None),
        *(q_1HTD.shape[2], k_1GTD.shape[2], 0.0, causal),
    )


def cpu_flash_forward(
    q_BHQD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    *,
    causal: bool,
    added_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention on a CPU: output and log-sum-exp. `added_mask` is added to the scores."""
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHQD, k_BHKD, v_BHKD, 0.0, causal, attn_mask=added_mask, scale=scale
    )


def cpu_flash_backward(
    grad_BHQD: Tensor,
    q_BHQD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    out_BHQD: Tensor,
    lse_BHQ: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `cpu_flash_forward`, without a mask."""
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_BHQD, q_BHQD, k_BHKD, v_BHKD, out_BHQD, lse_BHQ, 0.0, causal
    )


def block_weight(weight: Tensor) -> Tensor:
    """The weight of a linear layer in oneDNN's blocked layout."""
    return _mkldnn._reorder_linear_weight(weight)


def blocked_linear(x: Tensor, blocked: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer whose weight is in oneDNN's blocked layout."""
    return _mkldnn._linear_pointwise(x, blocked, bias, "none", [], "")


def replace_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Call `call` wherever the module is called, until this is None again. `module.compile` uses the same slot."""
    module._compiled_call_impl = call


def original_call(module: nn.Module) -> Callable[..., Any]:
    """What calls a module as it was before `replace_call`."""
    return module._call_impl


def mark_dynamic(x: Tensor, dim: int) -> None:
    """Tell the compiler that this size differs from call to call, or it would compile for each."""
    torch._dynamo.maybe_mark_dynamic(x, dim)


def activation_budget(share: float) -> AbstractContextManager[Any]:
    """Let what is compiled in this block keep this share of its activations for the backward pass."""
    return _partitioner.patch(activation_memory_budget=share)
