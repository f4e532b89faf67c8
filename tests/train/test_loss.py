"""Against numbers computed with SLiME's own functions (`tests/data/slime_grpo_golden.json`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dockyard.rl.advantage import group_advantages
from dockyard.rl.loss import low_var_kl, policy_loss

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "slime_grpo_golden.json").read_text())
CASES = [case for case in GOLDEN["cases"] if not case["calculate_per_token_loss"] and not case["use_tis"]]


def golden_loss(case: dict[str, Any], logits_TV: torch.Tensor) -> torch.Tensor:
    """The loss of the golden batch through our functions: a mean per rollout, then over rollouts."""
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    total, offset = torch.zeros(()), 0
    for index, tokens in enumerate(GOLDEN["tokens"]):
        length, response = GOLDEN["total_lengths"][index], GOLDEN["response_lengths"][index]
        rows = torch.arange(length - response - 1, length - 1) + offset
        logprobs_N = logprobs_TV[rows, torch.tensor(tokens[-response:])]
        mask_N = torch.tensor(GOLDEN["loss_masks"][index], dtype=torch.float32)
        advantages_N = torch.full((response,), GOLDEN["advantages_scalar"][index])
        policy = policy_loss(
            logprobs_N,
            torch.tensor(GOLDEN["old_log_probs"][index]),
            advantages_N,
            clip_low=case["eps_clip"],
            clip_high=case["eps_clip_high"],
        )
        kl_N = low_var_kl(logprobs_N, torch.tensor(GOLDEN["ref_log_probs"][index]))
        per_token_N = policy.loss_N + case["kl_loss_coef"] * kl_N
        total = total + (per_token_N * mask_N).sum() / mask_N.sum() / len(GOLDEN["tokens"])
        offset += length
    return total


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"kl={case['kl_loss_coef']}")
def test_loss_and_gradient_equal_slimes(case: dict[str, Any]):
    logits_TV = torch.tensor(GOLDEN["logits"], requires_grad=True)
    loss = golden_loss(case, logits_TV)
    loss.backward()
    assert logits_TV.grad is not None
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    assert logits_TV.grad.norm().item() == pytest.approx(case["grad_l2"], rel=1e-5)


def test_there_are_golden_cases_with_and_without_a_kl_penalty():
    assert {case["kl_loss_coef"] for case in CASES} == {0.0, 0.001}


def test_low_var_kl_equals_slimes_and_is_clamped():
    found = low_var_kl(torch.tensor(GOLDEN["kl"]["log_probs"]), torch.tensor(GOLDEN["kl"]["ref"]))
    assert found.tolist() == pytest.approx(GOLDEN["kl"]["low_var_kl"], rel=1e-5)


def test_advantages_equal_slimes():
    golden = GOLDEN["group_norm"]
    assert group_advantages(golden["rewards"]) == pytest.approx(golden["grpo_std(ddof=1,+1e-6)"], rel=1e-5)


@pytest.mark.parametrize("rewards", [[], [1.0], [0.7, 0.7, 0.7], [-1.0, -1.0]])
def test_a_group_without_a_difference_teaches_nothing(rewards: list[float]):
    assert group_advantages(rewards) == [0.0] * len(rewards)


def test_a_ratio_beyond_the_clip_range_earns_no_gradient():
    logprobs_N = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5])).requires_grad_()
    advantages_N = torch.tensor([1.0, -1.0, -1.0, 1.0])
    found = policy_loss(logprobs_N, torch.zeros(4), advantages_N, clip_low=0.2, clip_high=0.28)
    found.loss_N.sum().backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == pytest.approx([0.0, 0.0, 1.5, -0.5])
    assert found.clipped_N.tolist() == [1, 1, 0, 0]
