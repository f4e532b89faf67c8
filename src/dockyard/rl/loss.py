"""The loss of trained tokens as a pure function of their logprobs: clipped policy gradient, correction, KL penalty.

`grpo.loss` names a user-defined function that takes the place of `batch_loss`, with the same signature. "Sequence"
means the trained tokens of one segment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dockyard.config import GRPOConfig
from dockyard.errors import DockyardError
from dockyard.extension import failed_call, load_function

_KL_BOUND = 10.0
_LOG_BOUND = 20.0
"""The bound of log ratios: beyond it e^x overflows, and a gradient that clipping removes would be NaN instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Trained tokens, one entry of each tensor per token. Tokens that the policy did not sample are left out.

    An update is divided into batches (micro batches, and rows that share a prefix), each of which has whole segments.
    The gradients of the batches are added up. So a loss must be a sum over tokens of `weights_N` times the loss of the
    token, never a mean over the batch: the weights contain the divisor of the whole update. Compare tokens only within
    their segment, since which segments share a batch depends on memory.
    """

    logprobs_N: Tensor
    """Under the weights being trained. The only entry with a gradient."""
    old_N: Tensor
    """The denominator of the ratio: `recorded_N`, or with `grpo.correction` the logprobs under the current weights."""
    recorded_N: Tensor
    """As the engine reported them when it sampled the tokens. If it did not: under the current weights, or for recorded
    rollouts under the base model."""
    reference_N: Tensor | None
    """Under the base model; None if `grpo.kl_coef` is 0 and nothing else needs them."""
    advantages_N: Tensor
    """The advantage of the token's rollout, 0 for rollouts that are no better or worse than their group."""
    weights_N: Tensor
    """The weight of the token in the loss, as `grpo.aggregation` defines it relative to the whole update."""
    segments_N: Tensor
    """Which segment of this batch the token belongs to, from 0. A rollout has several if its history was rewritten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a batch, and two values per token for the metrics."""

    total: Tensor
    """A scalar with a gradient."""
    clipped_N: Tensor
    """1 where clipping removed the gradient, else 0. Its mean is `train/clip_fraction`."""
    kl_N: Tensor
    """The KL estimate, 0 if there is none. Its mean is `train/kl`."""


type LossFunction = Callable[[Batch, GRPOConfig], Loss]


def load_loss(config: GRPOConfig) -> LossFunction:
    """The function that `grpo.loss` names, with its results checked; `batch_loss` if it names none.

    A wrong reference or signature is a UsageError.
    """
    reference = config.loss
    if reference is None:
        return batch_loss
    function = load_function(reference, "grpo.loss", batch_loss)

    def checked_loss(batch: Batch, config: GRPOConfig) -> Loss:
        try:
            loss: Any = function(batch, config)
        except torch.OutOfMemoryError:
            raise  # the policy retries with fewer activations
        except Exception as error:  # the function is the user's
            about = f"a batch of {len(batch.logprobs_N)} tokens"
            raise failed_call(error, reference, "grpo.loss", about) from error
        if problem := _loss_problem(loss, batch.logprobs_N):
            raise DockyardError(
                f"`grpo.loss` is `{reference}`, which returned {problem}",
                hint="see `Loss` in `dockyard.rl.loss`: a scalar `total` that depends on `batch.logprobs_N`, and "
                "`clipped_N` and `kl_N` with one value per token",
            )
        return loss

    return checked_loss


def _loss_problem(loss: Any, logprobs_N: Tensor) -> str | None:
    """What is wrong with the result of a user's function; None if it can be used."""
    if not isinstance(loss, Loss):
        return f"`{loss!r}`, which is not a `Loss`"
    for name, value in {"total": loss.total, "clipped_N": loss.clipped_N, "kl_N": loss.kl_N}.items():
        if not isinstance(value, Tensor):
            return f"a `Loss` whose `{name}` is `{value!r}`, not a tensor"
        expected = () if name == "total" else tuple(logprobs_N.shape)
        if tuple(value.shape) != expected:
            return f"a `Loss` whose `{name}` has the shape {tuple(value.shape)} instead of {expected}"
    if not loss.total.requires_grad:
        return "a `Loss` whose `total` has no gradient"
    if torch.autograd.grad(loss.total, logprobs_N, retain_graph=True, allow_unused=True)[0] is None:
        return "a `Loss` whose `total` does not depend on `batch.logprobs_N`"
    return None


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
