"""The gradient of a batch that was converted for SLiME is that of our own trainer on the same rollouts.

SLiME's loss stands here as these flags of its have it: `--use-rollout-logprobs --use-kl-loss --kl-loss-type
low_var_kl`, the mean over a rollout's trained tokens, then over all rollouts of the batch, lost ones included.
`SLIME_REPO=DIR TORCH_COMPILE_DISABLE=1` takes the loss of each token from a checkout's own functions.
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from gateway_fakes import tiny_renderer
from slime_stand_in import SLIME_REPO, train_data, unpacked
from tiny_policy import tiny_policy
from torch import Tensor

from dockyard.backends.slime.hooks import reward_post_process
from dockyard.backends.slime.samples import even, step_samples
from dockyard.config import GRPOConfig, RunConfig
from dockyard.trainer.policy import Policy
from dockyard.types import Blame, Failure, Group, Rollout, Segment

pytestmark = pytest.mark.train

TEMPERATURE = 0.8
LOST = Failure(cause="host_error", blame=Blame.INFRASTRUCTURE, message="")
CASES: dict[str, tuple[list[list[float | None]], int, float]] = {
    "plain": ([[1.0, 0.0, 0.0, 1.0]], 1, 0.0),
    "kl": ([[1.0, 0.0, 0.0, 1.0], [0.5, 0.2, 0.2, 0.2]], 1, 0.1),
    "segments": ([[1.0, 0.0, 0.0, 1.0]], 3, 0.1),
    "lost": ([[1.0, None, 0.0, 1.0], [None, None, 1.0, None]], 2, 0.1),
    "all alike": ([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]], 2, 0.1),
    "nothing to compare": ([[None, None, 1.0, None]], 1, 0.1),
}
"""Rewards by group, the most segments a rollout has, the weight of the KL penalty."""
GOLDEN = {
    "plain": 42.17896,
    "kl": 30.47957,
    "segments": 41.56991,
    "lost": 33.12134,
    "all alike": 10.74042,
    "nothing to compare": 0.0,
}
"""The norm of SLiME's gradient."""


def make_segment(rng: np.random.Generator, prompt: list[int]) -> Segment:
    """Two turns with a tool's output between them."""
    sampled = [False] * len(prompt) + [True] * int(rng.integers(2, 6)) + [False] * 3 + [True] * 4
    ids = np.array([*prompt, *rng.integers(3, 300, len(sampled) - len(prompt))], np.int32)
    logprobs = np.where(sampled, -rng.uniform(3, 9, len(sampled)), 0).astype(np.float32)
    return Segment(
        token_ids=ids,
        sampled=np.array(sampled),
        logprobs=logprobs,
        versions=np.where(sampled, 1, -1).astype(np.int32),
    )


def make_groups(rewards: list[list[float | None]], most_segments: int) -> list[Group]:
    rng = np.random.default_rng(7)
    groups: list[Group] = []
    for number, of_group in enumerate(rewards):
        prompt = rng.integers(3, 300, 9).tolist()
        rollouts = [
            Rollout(
                task=f"t{number}",
                kind="",
                attempt=attempt,
                segments=tuple(make_segment(rng, prompt) for _ in range(1 + attempt % most_segments)),
                reward=reward,
                failure=LOST if reward is None else None,
            )
            for attempt, reward in enumerate(of_group)
        ]
        groups.append(Group(task=f"t{number}", rollouts=tuple(rollouts)))
    return groups


def ready_policy(kl_coef: float) -> Policy:
    """Away from its reference, and its gradients neither clipped nor applied."""
    policy = tiny_policy(lr=0.0, kl_coef=kl_coef, temperature=TEMPERATURE, max_grad_norm=1e9)
    torch.manual_seed(3)
    with torch.no_grad():
        for _, parameter in trained(policy):
            parameter.add_(0.05 * torch.randn_like(parameter))
    return policy


def trained(policy: Policy) -> list[tuple[str, Tensor]]:
    return [(name, parameter) for name, parameter in policy.model.named_parameters() if parameter.requires_grad]


def gradient(policy: Policy) -> Tensor:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in trained(policy)]
    return torch.cat([grad.flatten() for grad in grads]).double()


def slime_data(groups: Sequence[Group]) -> dict[str, Any]:
    config = RunConfig(grpo=GRPOConfig(group_size=4, tasks_per_step=len(groups)))
    samples = unpacked(even(step_samples(groups, 0, config, tiny_renderer())))
    return train_data(None, samples, reward_post_process)


def response_logprobs(model: Any, tokens: list[int], length: int) -> Tensor:
    logits_TV = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float() / TEMPERATURE
    places = torch.arange(len(tokens) - length, len(tokens))
    return logits_TV.log_softmax(-1)[places - 1, torch.tensor(tokens)[places]]


def clipped_loss(ratio_R: Tensor, advantage: float, grpo: GRPOConfig) -> Tensor:
    if SLIME_REPO:
        advantages_R = torch.full_like(ratio_R, advantage)
        compute = import_module("slime.utils.ppo_utils").compute_policy_loss
        return compute(-ratio_R.log(), advantages_R, grpo.clip_low, grpo.clip_high)[0]
    clipped_R = ratio_R.clamp(1 - grpo.clip_low, 1 + grpo.clip_high)
    return torch.maximum(-ratio_R * advantage, -clipped_R * advantage)


def kl(new_R: Tensor, reference_R: Tensor) -> Tensor:
    if SLIME_REPO:
        return import_module("slime.utils.ppo_utils").compute_approx_kl(new_R, reference_R, "low_var_kl")
    apart_R = reference_R - new_R
    return (apart_R.exp() - 1 - apart_R).clamp(-10, 10)


def slime_loss(policy: Policy, data: dict[str, Any], kl_coef: float, grpo: GRPOConfig) -> Tensor:
    """Over the batch as one optimiser step takes it."""
    total = torch.zeros(())
    num_rollouts = len(set(data["rollout_ids"]))
    for number, tokens in enumerate(data["tokens"]):
        length = data["response_lengths"][number]
        new_R = response_logprobs(policy.model, tokens, length)
        with torch.no_grad(), policy.model.disable_adapter():
            reference_R = response_logprobs(policy.model, tokens, length)
        ratio_R = (new_R - torch.tensor(data["rollout_log_probs"][number])).exp()
        advantage = data["rewards"][number]
        loss_R = clipped_loss(ratio_R, advantage, grpo) + kl_coef * kl(new_R, reference_R)
        mask_R = torch.tensor(data["loss_masks"][number])
        total = total + (loss_R * mask_R).sum() / max(data["rollout_mask_sums"][number], 1)
    return total / num_rollouts


def gradients(case: str) -> tuple[Tensor, Tensor, float]:
    """Ours, SLiME's, and the share of rollouts that are compared: lost ones are in SLiME's mean, as zeros."""
    rewards, most_segments, kl_coef = CASES[case]
    groups = make_groups(rewards, most_segments)
    policy = ready_policy(kl_coef)
    policy.update(groups, 1)
    ours = gradient(policy)
    policy.model.zero_grad()
    policy.model.eval()
    slime_loss(policy, slime_data(groups), kl_coef, GRPOConfig()).backward()
    compared = [n for group in rewards if (n := sum(reward is not None for reward in group)) > 1]
    return ours, gradient(policy), sum(compared) / sum(map(len, rewards))


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_a_converted_batch_is_our_own_trainers(case: str):
    ours, slimes, compared = gradients(case)
    assert float((slimes - compared * ours).norm()) <= 1e-5 * float(ours.norm())
    assert float(slimes.norm()) == pytest.approx(GOLDEN[case], rel=1e-3)


def test_segments_of_a_rollout_weigh_like_one_and_lost_rollouts_like_none():
    [group] = make_groups([[1.0, 0.0]], 2)
    data = slime_data([group])
    assert data["rollout_ids"] == [0, 1, 1]
    assert data["rollout_mask_sums"][1] == data["rollout_mask_sums"][2] == group.rollouts[1].num_sampled
    lost = replace(group.rollouts[1], reward=None, failure=LOST)
    alone = slime_data([Group(task="t", rollouts=(group.rollouts[0], lost))])
    assert alone["rewards"] == [0.0, 0.0]
    assert not any(map(any, alone["loss_masks"]))  # a rollout without another to compare with trains nothing
