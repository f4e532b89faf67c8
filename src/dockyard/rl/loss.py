"""The clipped policy-gradient loss and the KL penalty, as functions of logprobs alone."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Per token, before weighting."""

    loss_N: Tensor
    clipped_N: Tensor
    """1 where clipping took the gradient away."""


def policy_loss(
    logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """PPO's pessimistic bound: the ratio to the weights that drew the token earns nothing beyond the clip range."""
    ratio_N = (logprobs_N - old_logprobs_N).exp()
    free_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return PolicyLoss(loss_N=torch.maximum(free_N, bounded_N), clipped_N=(bounded_N > free_N).float())


def low_var_kl(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """The estimator k3 of KL(policy || reference): never negative, small variance; clamped to [-10, 10] as in SLiME."""
    log_ratio_N = reference_logprobs_N - logprobs_N
    return (log_ratio_N.exp() - log_ratio_N - 1).clamp(-10, 10)
