"""How far from the policy are rollouts that it did not draw? Told before they are trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Self

import numpy as np
import torch

from dockyard.rl.examples import examples_of
from dockyard.rl.pack import pack
from dockyard.trainer.policy import Policy
from dockyard.types import FloatArray, Group

_UNLIKELY = 0.01
_MAX_SEGMENTS = 64
"""Enough for two digits, and quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicy:
    """Recorded tokens as the policy sees them before the first update."""

    tokens: int
    mean_logprob: float
    unlikely: float
    """The share of tokens that the policy would draw less than once in a hundred times."""
    mismatch: float | None
    """Mean distance to the recorded logprobs; None when nobody recorded any."""

    @classmethod
    def of(cls, logprobs: FloatArray, recorded: FloatArray) -> Self:
        known = ~np.isnan(recorded)
        distances = np.abs(logprobs - recorded)[known]
        return cls(
            tokens=len(logprobs),
            mean_logprob=float(logprobs.mean()),
            unlikely=float((np.exp(logprobs) < _UNLIKELY).mean()),
            mismatch=float(distances.mean()) if len(distances) else None,
        )

    def warning(self, num_steps: int) -> str:
        """For people."""
        known = (
            "no logprobs were recorded: those of the base model stand in for them"
            if self.mismatch is None
            else f"their recorded logprobs are {self.mismatch:.3f} nats off on average"
        )
        return (
            f"off-policy: these rollouts are not the policy's own. Over {self.tokens:,} of their tokens "
            f"its perplexity is {exp(min(-self.mean_logprob, 50.0)):.2f}, and it would draw {self.unlikely:.1%} of "
            f"them less than once in 100 times; {known}. {num_steps} updates will move it further away"
        )


def measure(policy: Policy, groups: Sequence[Group], micro_batch_tokens: int) -> OffPolicy | None:
    """Over some of the segments, evenly spread; None when no token is to be trained."""
    examples = examples_of(groups, with_idle=True)
    chosen = examples[:: max(1, len(examples) // _MAX_SEGMENTS)]
    rows = pack(chosen, micro_batch_tokens)
    if not rows:
        return None
    with torch.no_grad():
        logprobs = [policy.logprobs(row).float().cpu().numpy() for row in rows]
    return OffPolicy.of(np.concatenate(logprobs), np.concatenate([row.old_logprobs for row in rows]))
