"""CISPO (MiniMax-M1): clip the importance weight of a token instead of its update, so that every token has a gradient.

`--grpo.loss examples.extend.loss:loss --grpo.kl_coef 0` from the root of the repository.
"""

import torch

from dockyard.config import GRPOConfig
from dockyard.rl.loss import Batch, Loss


def loss(batch: Batch, config: GRPOConfig) -> Loss:
    ratio_N = (batch.logprobs_N - batch.old_N).detach().exp()
    weight_N = ratio_N.clamp(max=1 + config.clip_high)
    loss_N = -weight_N * batch.advantages_N * batch.logprobs_N
    return Loss(
        total=(batch.weights_N * loss_N).sum(),  # a sum, not a mean: the weights contain the divisor
        clipped_N=(ratio_N > weight_N).float(),
        kl_N=torch.zeros_like(loss_N),
    )
