"""Against numbers computed with SLiME's own functions (`tests/data/slime_grpo_golden.json`)."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from dockyard.config import GRPOConfig
from dockyard.rl.advantage import ADVANTAGES, std_advantage
from dockyard.rl.loss import Batch, batch_loss, kl, mismatch_kl, policy_loss

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "slime_grpo_golden.json").read_text())


def golden_batch(logits_TV: torch.Tensor, *, per_token: bool) -> Batch:
    """SLiME's four samples as one batch of their unmasked tokens."""
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    masks = [torch.tensor(mask, dtype=torch.bool) for mask in GOLDEN["loss_masks"]]
    ends = torch.tensor(GOLDEN["total_lengths"]).cumsum(0).tolist()
    logprobs: list[torch.Tensor] = []
    for tokens, response, end in zip(GOLDEN["tokens"], GOLDEN["response_lengths"], ends, strict=True):
        logprobs.append(logprobs_TV[torch.arange(end - response - 1, end - 1), torch.tensor(tokens[-response:])])

    def unmasked(values: list[Any]) -> torch.Tensor:
        return torch.cat([torch.as_tensor(value)[mask] for value, mask in zip(values, masks, strict=True)])

    sizes = torch.tensor([int(mask.sum()) for mask in masks])
    weights_S = torch.full((4,), 1.0 / int(sizes.sum())) if per_token else 1.0 / (4 * sizes)
    return Batch(
        logprobs_N=unmasked(logprobs),
        old_N=unmasked(GOLDEN["old_log_probs"]),
        recorded_N=unmasked(GOLDEN["rollout_log_probs"]),
        reference_N=unmasked(GOLDEN["ref_log_probs"]),
        advantages_N=torch.tensor(GOLDEN["advantages_scalar"]).repeat_interleave(sizes),
        weights_N=weights_S.repeat_interleave(sizes),
        segments_N=torch.arange(4).repeat_interleave(sizes),
    )


def case_id(case: dict[str, Any]) -> str:
    aggregation = "token" if case["calculate_per_token_loss"] else "rollout"
    return f"{aggregation}, {'corrected' if case['use_tis'] else 'plain'}, kl {case['kl_loss_coef']}"


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=case_id)
def test_loss_and_gradient_equal_slimes(case: dict[str, Any]):
    config = GRPOConfig(
        clip_low=case["eps_clip"],
        clip_high=case["eps_clip_high"],
        kl_coef=case["kl_loss_coef"],
        kl_type=case["kl_loss_type"],
        correction="token" if case["use_tis"] else "none",
        correction_cap=case["tis_clip"],
    )
    logits_TV = torch.tensor(GOLDEN["logits"], requires_grad=True)
    loss = batch_loss(golden_batch(logits_TV, per_token=case["calculate_per_token_loss"]), config)
    loss.total.backward()
    assert logits_TV.grad is not None
    assert loss.total.item() == pytest.approx(case["loss"] / case["normalizer"], abs=1e-6)
    assert logits_TV.grad.norm().item() == pytest.approx(case["grad_l2"] / case["normalizer"], rel=1e-5)


def test_the_golden_cases_are_of_every_kind():
    assert len({case_id(case) for case in GOLDEN["cases"]}) == 8


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_estimators_equal_slimes(kind: Literal["k1", "k2", "k3", "low_var_kl"]):
    found = kl(torch.tensor(GOLDEN["kl"]["log_probs"]), torch.tensor(GOLDEN["kl"]["ref"]), kind)
    assert found.tolist() == pytest.approx(GOLDEN["kl"][kind], rel=1e-5)


def test_the_mismatch_kl_of_many_draws_is_the_divergence_of_engine_and_trainer():
    engine = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    trainer = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    one = torch.ones(3, dtype=torch.float64)
    batch = Batch(
        logprobs_N=trainer.log(),
        old_N=trainer.log(),
        recorded_N=engine.log(),
        reference_N=None,
        advantages_N=one,
        weights_N=one,
        segments_N=torch.zeros(3, dtype=torch.long),
    )
    expected = (engine * (engine / trainer).log()).sum().item()
    assert (engine * mismatch_kl(batch)).sum().item() == pytest.approx(expected)


def test_advantages_equal_slimes():
    golden = GOLDEN["group_norm"]
    assert std_advantage(golden["rewards"], ()) == pytest.approx(golden["grpo_std(ddof=1,+1e-6)"], rel=1e-5)


@pytest.mark.parametrize("rewards", [[], [1.0], [0.7, 0.7, 0.7], [-1.0, -1.0], [0.1 + 0.2, 0.3]])
def test_a_group_without_a_difference_teaches_nothing(rewards: list[float]):
    for function in ADVANTAGES.values():
        assert function(rewards, ()) == [0.0] * len(rewards)


@pytest.mark.parametrize("distance", [-500.0, -100.0, 100.0, 500.0])
def test_a_token_that_one_side_finds_impossible_costs_no_update(distance: float):
    logprobs_N = torch.tensor([-1.0, -1.0]).requires_grad_()
    found = policy_loss(logprobs_N + distance + 1, torch.tensor([1.0, 0.0]), clip_low=0.2, clip_high=0.28)
    penalty_N = kl(logprobs_N, torch.tensor([-1.0 + distance] * 2), "low_var_kl")
    (found.loss_N.sum() + penalty_N.sum()).backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.isfinite().all()


def test_a_ratio_beyond_the_clip_range_earns_no_gradient():
    logprobs_N = torch.log(torch.tensor([1.5, 0.5, 1.5, 0.5])).requires_grad_()
    advantages_N = torch.tensor([1.0, -1.0, -1.0, 1.0])
    found = policy_loss(logprobs_N, advantages_N, clip_low=0.2, clip_high=0.28)
    found.loss_N.sum().backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == pytest.approx([0.0, 0.0, 1.5, -0.5])
    assert found.clipped_N.tolist() == [1, 1, 0, 0]
