"""The loss of trained tokens as a pure function of their logprobs: clipped policy gradient, correction, KL penalty.

A batch may be any part of an update that does not divide segments: weights are relative to the whole update, so the
losses of its parts add up. "Sequence" means the trained tokens of one segment.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dockyard.config import GRPOConfig

_KL_BOUND = 10.0
_LOG_BOUND = 20.0
"""The bound of log ratios: beyond it e^x overflows, and a gradient that clipping removes would be NaN instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The trained tokens, one entry each."""

    logprobs_N: Tensor
    """Under the weights being trained, with a gradient."""
    old_N: Tensor
    """Under the weights in the denominator of the ratio."""
    recorded_N: Tensor
    """As the engine reported them when it sampled the tokens."""
    reference_N: Tensor | None
    """Under the base model; None if there is no KL penalty."""
    advantages_N: Tensor
    weights_N: Tensor
    segments_N: Tensor
    """Which segment the token belongs to, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a batch, and its parts per token."""

    total: Tensor
    clipped_N: Tensor
    """1 where clipping removed the gradient."""
    kl_N: Tensor


def batch_loss(batch: Batch, config: GRPOConfig) -> Loss:
    """The part of an update's loss that this batch contributes."""
    log_ratio_N = batch.logprobs_N - batch.old_N
    if config.ratio == "sequence":
        log_ratio_N = _segment_means(log_ratio_N, batch.segments_N)
    policy = policy_loss(log_ratio_N, batch.advantages_N, clip_low=config.clip_low, clip_high=config.clip_high)
    loss_N = policy.loss_N
    if config.correction != "none":
        loss_N = loss_N * correction_weights(batch, config.correction, config.correction_cap)
    kl_N = torch.zeros_like(loss_N)
    if batch.reference_N is not None and config.kl_coef > 0:
        kl_N = kl(batch.logprobs_N, batch.reference_N, config.kl_type)
        loss_N = loss_N + config.kl_coef * kl_N
    return Loss(total=(batch.weights_N * loss_N).sum(), clipped_N=policy.clipped_N, kl_N=kl_N.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The policy gradient loss per token, before weighting."""

    loss_N: Tensor
    clipped_N: Tensor


def policy_loss(log_ratio_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """PPO's clipped objective: beyond the clip range a better ratio has no gradient."""
    ratio_N = _exp(log_ratio_N)
    free_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return PolicyLoss(loss_N=torch.maximum(free_N, bounded_N), clipped_N=(bounded_N > free_N).float())


def correction_weights(batch: Batch, level: Literal["token", "sequence"], cap: float) -> Tensor:
    """Truncated importance weights of the trainer's distribution over the engine's, at most `cap`."""
    log_ratio_N = (batch.old_N - batch.recorded_N).detach()
    if level == "sequence":
        log_ratio_N = _segment_sums(log_ratio_N, batch.segments_N)
    return _exp(log_ratio_N).clamp(max=cap)


def kl(logprobs_N: Tensor, reference_N: Tensor, kind: Literal["low_var_kl", "k1", "k2", "k3"]) -> Tensor:
    """An estimate of KL(policy || reference) from a token that the policy sampled.

    k1 is unbiased but may be negative, k2 has low variance but some bias, k3 is unbiased and never negative;
    `low_var_kl` is k3, clamped.
    """
    log_ratio_N = reference_N - logprobs_N
    if kind == "k1":
        return -log_ratio_N
    if kind == "k2":
        return log_ratio_N.square() / 2
    k3_N = _exp(log_ratio_N) - log_ratio_N - 1
    return k3_N.clamp(-_KL_BOUND, _KL_BOUND) if kind == "low_var_kl" else k3_N


def mismatch_kl(batch: Batch) -> Tensor:
    """The k3 estimate of KL(engine || trainer) per token."""
    return kl(batch.recorded_N, batch.logprobs_N.detach(), "k3")


def _exp(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(-_LOG_BOUND, _LOG_BOUND).exp()


def _segment_sums(values_N: Tensor, segments_N: Tensor) -> Tensor:
    """For each token the sum over its segment."""
    sums_S = values_N.new_zeros(int(segments_N.max()) + 1).index_add(0, segments_N, values_N)
    return sums_S[segments_N]


def _segment_means(values_N: Tensor, segments_N: Tensor) -> Tensor:
    return _segment_sums(values_N, segments_N) / _segment_sums(torch.ones_like(values_N), segments_N)
