"""A prefix run once for several rows: losses and gradients are those of the sequences one by one."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import tiny_model_dir
from transformers import LlamaForCausalLM

from dockyard.config import ALGORITHMS, GRPOConfig, TrainerConfig
from dockyard.rl.pack import Example, pack
from dockyard.rl.trees import Tree, plant
from dockyard.trainer import attention, layers
from dockyard.trainer.policy import Policy

PREFIX = 600
SETTINGS = TrainerConfig(lr=1e-3, lora_r=4, max_grad_norm=1e9)  # or all gradients would have the same norm


def example(rng: np.random.Generator, beginning: list[int], num_own: int, targets: list[int]) -> Example:
    """Its own last tokens are trained, and those at `targets`."""
    ids = np.array([*beginning, *rng.integers(20, 40, num_own).tolist()], np.int32)
    trained = np.array([*targets, *range(len(beginning) + 2, len(ids))], np.int32)
    return Example(
        token_ids=ids,
        targets=trained,
        old_logprobs=rng.normal(-4, 1, len(trained)).astype(np.float32),
        advantage=float(rng.normal()),
        weight=1 / len(trained),
    )


def examples() -> list[Example]:
    """Six over one beginning, two of which go on alike; some were drawn from inside it, or right after its end."""
    rng = np.random.default_rng(0)
    beginning = rng.integers(3, 40, PREFIX).tolist()
    longer = [*beginning, 41, 42, 43]
    drawn = [100, 101, 599]
    return [
        example(rng, [*beginning, 44], 30, drawn),
        example(rng, [*beginning, 45], 50, [PREFIX]),
        example(rng, longer, 20, drawn),
        example(rng, longer, 25, []),
        example(rng, [*beginning, 46], 9, [PREFIX]),
        example(rng, [*beginning, 47], 70, drawn),
    ]


def make_policy(grpo: GRPOConfig, dtype: torch.dtype, *, rounded: bool = False) -> Policy:
    """`rounded` gives it the weights that it would have in bfloat16."""
    base: Any = LlamaForCausalLM.from_pretrained(tiny_model_dir(), max_position_embeddings=1024)
    base = base.to(torch.bfloat16) if rounded else base
    policy = Policy(base.to(dtype), SETTINGS, grpo, temperature=0.9, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)  # the same in all number formats
    return policy


def trained_on(
    grpo: GRPOConfig, trees: list[Tree], dtype: torch.dtype, *, rounded: bool = False
) -> tuple[dict[str, float], torch.Tensor]:
    policy = make_policy(grpo, dtype, rounded=rounded)
    metrics = policy.train_on(trees, 1e-3)
    return metrics, torch.cat([p.grad.double().flatten() for p in policy.model.parameters() if p.grad is not None])


def alone() -> list[Tree]:
    return [Tree(prefix=np.zeros(0, np.int32), rows=(row,)) for item in examples() for row in pack([item], 1)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 1e-4)])
@pytest.mark.parametrize("options", [*({"algorithm": name} for name in ALGORITHMS), {"correction": "sequence"}])
def test_a_tree_has_the_loss_and_the_gradients_of_its_sequences_one_by_one(
    options: dict[str, Any], dtype: torch.dtype, tolerance: float
):
    grpo = GRPOConfig(**options, kl_coef=0.1)
    trees = plant(examples(), 80)
    assert [(len(tree.prefix), len(tree.rows)) for tree in trees] == [(PREFIX, 3)]
    assert trees[0].num_tokens < 900 < sum(tree.num_tokens for tree in alone())
    (metrics, grads), (expected, expected_grads) = (trained_on(grpo, way, dtype) for way in (trees, alone()))
    assert expected_grads.norm() > 1e-3
    assert (grads - expected_grads).norm() < tolerance * expected_grads.norm()
    for name in ("train/loss", "train/kl", "train/entropy", "train/mean_logprob", "train/tokens"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5)


def test_in_bfloat16_a_tree_is_as_near_the_truth_as_its_sequences_one_by_one():
    """What rows ask of their prefix is summed up in float32, and the prefix's own pass is in bfloat16 again."""
    grpo = GRPOConfig(correction="token", kl_coef=0)  # nothing is clipped, which would make steps of small differences
    truth = trained_on(grpo, alone(), torch.float64, rounded=True)[1]
    ours, plain = (trained_on(grpo, way, torch.bfloat16)[1] for way in (plant(examples(), 80), alone()))
    assert (plain - truth).norm() < 0.4 * truth.norm()
    assert (ours - truth).norm() < 1.5 * (plain - truth).norm()


def test_a_prefix_that_rows_only_look_back_at_is_trained_too():
    """No token was drawn right after it, so that its last hidden state serves nothing: keys and values do."""
    rng = np.random.default_rng(1)
    beginning = rng.integers(3, 40, PREFIX).tolist()
    items = [example(rng, [*beginning, 50 + index], 40, []) for index in range(3)]
    trees = plant(items, 50)
    assert len(trees[0].prefix) == PREFIX
    one_by_one = [Tree(prefix=np.zeros(0, np.int32), rows=(row,)) for item in items for row in pack([item], 1)]
    grpo = GRPOConfig(kl_coef=0)
    (_, grads), (_, expected) = (trained_on(grpo, way, torch.float64) for way in (trees, one_by_one))
    assert (grads - expected).norm() < 1e-7 * expected.norm()


def test_layers_that_run_twice_give_the_same_gradients_of_a_tree(monkeypatch: pytest.MonkeyPatch):
    """Nor do they where its prefix's keys and values are made again while their gradients are asked for."""
    trees = plant(examples(), 80)
    found: list[torch.Tensor] = []
    for free in (math.inf, 0.0):
        monkeypatch.setattr(layers, "free_bytes", lambda _, free=free: free)
        found.append(trained_on(GRPOConfig(kl_coef=0.1), trees, torch.float32)[1])
    assert found[0].norm() > 1e-3
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_nothing_is_left_of_a_prefix_when_a_row_fails():
    policy = make_policy(GRPOConfig(), torch.float32)
    [tree] = plant(examples(), 80)
    last = tree.rows[-1]
    broken = replace(last, token_ids=np.full_like(last.token_ids, 10**6))  # no such token
    with pytest.raises(IndexError):
        policy.train_on([replace(tree, rows=(*tree.rows[:-1], broken))], 1e-3)
    assert attention._CONTEXT.prefixes == {}
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_nothing_is_left_of_a_prefix_when_its_rows_are_done():
    trained_on(GRPOConfig(), plant(examples(), 80), torch.float32)
    assert attention._CONTEXT.prefixes == {}
