"""Draws tokens from logits, each with a random number of its request's own."""

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 512
"""Tokens whose probabilities are first summed: only one block a row is looked at one by one."""


def sample(logits_BV: Tensor, temperatures: list[float], draws: list[float]) -> tuple[list[int], list[float]]:
    """Draw one token a row by inverting its cumulative distribution at a number in [0, 1).

    Returns the tokens and their logprobs under the distribution they were drawn from, which is certain (0) for
    temperature 0.
    """
    both_2B = torch.tensor([temperatures, draws], dtype=torch.float64).to(logits_BV.device)
    ids_B, logprobs_B = draw(logits_BV, both_2B[0], both_2B[1])
    return ids_B.tolist(), logprobs_B.tolist()


def draw(logits_BV: Tensor, temperatures_B: Tensor, draws_B: Tensor) -> tuple[Tensor, Tensor]:
    """`sample` without leaving the device; the random numbers are float64."""
    greedy_B = temperatures_B == 0
    scale_B1 = torch.where(greedy_B, 1.0, temperatures_B).float()[:, None]
    logprobs_BV = torch.log_softmax(logits_BV.float() / scale_B1, dim=-1)
    drawn_B = _invert(logprobs_BV.exp(), draws_B)
    ids_B = torch.where(greedy_B, logits_BV.argmax(-1), drawn_B)
    return ids_B, logprobs_BV.gather(1, ids_B[:, None])[:, 0].masked_fill(greedy_B, 0.0)


def _invert(probabilities_BV: Tensor, draws_B: Tensor) -> Tensor:
    """The token at which each row's cumulative probability passes its draw."""
    size = probabilities_BV.shape[1]
    blocks_BNK = pad(probabilities_BV, (0, -size % _BLOCK)).unflatten(1, (-1, _BLOCK))
    sums_BN = blocks_BNK.sum(-1, dtype=torch.float64)
    block_B1, share_B1 = _find(sums_BN, draws_B[:, None])
    inside_BK = blocks_BNK.gather(1, block_B1[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    token_B1, _ = _find(inside_BK.double(), share_B1)
    return (block_B1 * _BLOCK + token_B1)[:, 0]


def _find(weights_BN: Tensor, draws_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Which weight each draw in [0, 1) falls on, never one that is 0, and how far into it, again from 0 to 1."""
    ends_BN = weights_BN.cumsum(-1)
    target_B1 = draws_B1 * ends_BN[:, -1:]
    last_B1 = (ends_BN < ends_BN[:, -1:]).sum(-1, keepdim=True)  # the last that is not 0: rounding may pass it
    found_B1 = torch.searchsorted(ends_BN, target_B1, right=True).minimum(last_B1)
    weight_B1 = weights_BN.gather(1, found_B1)
    begins_B1 = ends_BN.gather(1, found_B1) - weight_B1
    return found_B1, ((target_B1 - begins_B1) / weight_B1).clamp(0, 1)
