import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_policy import make_group, tiny_policy

from dockyard.config import TrainerConfig
from dockyard.rl.pack import Example, examples_of, pack
from dockyard.trainer.policy import Policy, learning_rate
from dockyard.trainer.policy import _add as add_gradients
from dockyard.types import Blame, Failure, Group, Rollout

TORN = Failure(cause="engine_failed", blame=Blame.INFRASTRUCTURE, message="gone")


def gradients(policy: Policy, groups: list[Group], max_tokens: int = 10_000) -> torch.Tensor:
    """What an update would do, all in one vector."""
    policy.model.zero_grad()
    rows = pack(examples_of(groups, with_idle=True), max_tokens)
    for row in rows:
        weights = torch.from_numpy(row.weights * row.advantages)
        (policy.logprobs(row) * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


def parameters(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters() if p.requires_grad])


def plain_logprobs(policy: Policy, example: Example) -> torch.Tensor:
    ids_1T = torch.from_numpy(example.token_ids).long()[None]
    logits = policy.model(input_ids=ids_1T, use_cache=False).logits[0]
    targets = torch.from_numpy(example.targets).long()
    return torch.log_softmax(logits, -1)[targets - 1, ids_1T[0, targets]]


def shake(policy: Policy) -> Policy:
    """Adapters begin as nothing; give them something to say."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    return policy


@pytest.mark.parametrize("max_tokens", [1, 30, 10_000])
def test_packed_rows_with_shared_prefixes_give_the_logprobs_of_the_sequences_one_by_one(max_tokens: int):
    policy = shake(tiny_policy())
    examples = examples_of([make_group([0.0, 1.0, 0.5, 0.0])], with_idle=True)
    rows = pack(examples, max_tokens)
    assert len(rows) == {1: 4, 30: 2, 10_000: 1}[max_tokens]
    packed = sorted(value for row in rows for value in policy.logprobs(row).tolist())
    plain = sorted(value for example in examples for value in plain_logprobs(policy, example).tolist())
    assert packed == pytest.approx(plain, abs=3e-5)


def test_packed_gradients_equal_those_of_the_sequences_one_by_one():
    policy = shake(tiny_policy())
    groups = [make_group([0.0, 1.0, 0.5, 0.0])]
    together, alone = gradients(policy, groups), gradients(policy, groups, max_tokens=1)
    assert together.norm() > 1e-3
    assert (together - alone).norm() < 1e-5 * together.norm()


def test_a_row_holds_what_sequences_begin_with_in_common_once():
    examples = examples_of([make_group([0.0, 1.0, 0.5, 0.0])], with_idle=True)
    [row] = pack(examples, 10_000)
    assert len(row.token_ids) == 12 + 5 + 6 + 7 + 8  # the prompt once, then each rollout's own tokens
    assert len(row.targets) == 5 + 6 + 7 + 8


def test_a_sequence_that_is_the_beginning_of_another_is_packed_right():
    policy = shake(tiny_policy())
    ids = np.array([5, 6, 7, 8, 9], np.int32)
    examples = [
        Example(
            token_ids=ids[:length], targets=np.array([length - 1], np.int32), old_logprobs=None, advantage=1, weight=1
        )
        for length in (3, 5, 3)
    ]
    [row] = pack(examples, 100)
    assert row.token_ids.tolist() == ids.tolist()
    expected = sorted(plain_logprobs(policy, example).item() for example in examples)
    assert sorted(policy.logprobs(row).tolist()) == pytest.approx(expected, abs=1e-5)


def test_a_rollout_lost_to_infrastructure_leaves_the_gradient_of_the_group_without_it():
    policy = shake(tiny_policy())
    whole = make_group([0.0, 1.0, 0.5, None])
    lost = replace(whole, rollouts=(*whole.rollouts[:3], replace(whole.rollouts[3], failure=TORN)))
    without = replace(whole, rollouts=whole.rollouts[:3])
    assert torch.equal(gradients(policy, [lost]), gradients(policy, [without]))


def test_a_rollout_of_many_segments_weighs_as_much_as_one_of_one():
    group = make_group([0.0, 1.0])
    first = group.rollouts[0]
    split: Rollout = replace(first, segments=(first.segments[0], group.rollouts[1].segments[0]))
    for rollouts in (group.rollouts, (split, group.rollouts[1])):
        examples = examples_of([replace(group, rollouts=rollouts)], with_idle=True)
        by_sign = {sign: sum(e.weight * len(e.targets) for e in examples if e.advantage * sign > 0) for sign in (-1, 1)}
        assert by_sign == pytest.approx({-1: 0.5, 1: 0.5})


def test_an_update_makes_better_rollouts_likelier_than_worse_ones():
    policy = tiny_policy(lr=1e-2)
    groups = [make_group([0.0, 1.0])]
    worse, better = examples_of(groups, with_idle=True)
    before = [plain_logprobs(policy, example).sum().item() for example in (worse, better)]
    metrics = [policy.update(groups, 10) for _ in range(5)]
    after = [plain_logprobs(policy, example).sum().item() for example in (worse, better)]
    assert after[1] > before[1]
    assert after[1] - after[0] > before[1] - before[0]
    assert policy.version == 5
    assert metrics[0]["train/tokens"] == 11


def test_a_learning_rate_of_zero_changes_nothing():
    policy = tiny_policy(lr=0.0)
    before = parameters(policy)
    policy.update([make_group([0.0, 1.0])], 10)
    assert torch.equal(parameters(policy), before)


def test_a_kl_penalty_pulls_back_to_the_base_model():
    far = {coef: shake(tiny_policy(lr=1e-2, kl_coef=coef)) for coef in (0.0, 1.0)}
    kls = {
        coef: [policy.update([make_group([0.5, 0.5])], 10).get("train/kl", 0.0) for _ in range(8)]
        for coef, policy in far.items()
    }
    assert kls[1.0][0] > kls[1.0][-1] > 0
    assert torch.equal(parameters(far[0.0]), parameters(shake(tiny_policy())))


def test_groups_without_sampled_tokens_skip_the_update():
    group = make_group([0.0, 1.0])
    empty = replace(group, rollouts=tuple(replace(rollout, segments=()) for rollout in group.rollouts))
    policy = tiny_policy()
    before = parameters(policy)
    assert policy.update([empty], 10)["train/tokens"] == 0
    assert torch.equal(parameters(policy), before)


def test_gradients_of_rows_are_summed_in_float32():
    sums: list[torch.Tensor] = []
    for value in [256.0, *[1.0] * 100]:  # from 256 on bfloat16 knows even numbers only
        add_gradients(sums, [torch.tensor([value], dtype=torch.bfloat16)])
    assert sums[0].item() == 356.0


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    policy = tiny_policy()
    before = parameters(policy)
    group = make_group([0.0, 1.0])
    broken = replace(group, rollouts=(replace(group.rollouts[0], reward=math.nan), group.rollouts[1]))
    metrics = policy.update([broken], 10)
    assert metrics["train/skipped"] == 1
    assert not math.isfinite(metrics["train/grad_norm"])
    assert torch.equal(parameters(policy), before)


def test_a_restored_policy_goes_on_to_the_same_bits(tmp_path: Path):
    groups = [make_group([0.0, 1.0, 0.3])]
    policy = tiny_policy()
    policy.update(groups, 10)
    (tmp_path / "c").mkdir()
    policy.save(tmp_path / "c")
    policy.update(groups, 10)
    other = tiny_policy()
    other.restore(tmp_path / "c")
    assert other.version == 1
    other.update(groups, 10)
    assert torch.equal(parameters(other), parameters(policy))


def test_the_learning_rate_rises_then_falls_to_zero():
    config = TrainerConfig(lr=1.0, warmup_steps=1, schedule="linear")
    assert [learning_rate(config, step, 4) for step in range(4)] == pytest.approx([0.5, 0.75, 0.5, 0.25])
    assert [learning_rate(TrainerConfig(lr=1.0), step, 4) for step in (0, 3)] == [1.0, 1.0]


def recorded(group: Group, policy: Policy, shift: float) -> Group:
    """The group with logprobs as if sampled by weights under which each token was `exp(-shift)` times as likely."""
    rollouts: list[Rollout] = []
    for rollout in group.rollouts:
        [segment] = rollout.segments
        example, _ = examples_of([replace(group, rollouts=(rollout, rollout))], with_idle=True)
        logprobs = np.zeros(len(segment.token_ids), np.float32)
        logprobs[example.targets] = plain_logprobs(policy, example).detach().numpy() - shift
        rollouts.append(replace(rollout, segments=(replace(segment, logprobs=logprobs),)))
    return replace(group, rollouts=tuple(rollouts))


@pytest.mark.parametrize(
    ("ratio", "clipped"),
    [
        (1.0, 0.0),
        (1.25, 0.0),  # between 1 + clip_low and 1 + clip_high
        (1.35, 6 / 11),  # the better rollout has 6 of the 11 tokens
        (0.85, 0.0),
        (0.75, 5 / 11),  # below 1 - clip_low, above 1 - clip_high: the worse rollout's 5
    ],
)
def test_an_update_clips_ratios_to_the_recorded_logprobs(ratio: float, clipped: float):
    policy = shake(tiny_policy(lr=0.0))
    group = recorded(make_group([0.0, 1.0]), policy, math.log(ratio))
    metrics = policy.update([group], 10)
    assert metrics["train/clip_fraction"] == pytest.approx(clipped)
    assert metrics["train/logprob_mismatch"] == pytest.approx(abs(math.log(ratio)), abs=1e-4)


def test_gradients_are_scaled_down_to_the_largest_norm_allowed():
    sizes = {}
    for limit in (1e-9, 1e3):
        policy = tiny_policy(max_grad_norm=limit)
        before = parameters(policy)
        policy.update([make_group([0.0, 1.0])], 10)
        sizes[limit] = float((parameters(policy) - before).norm())
    assert sizes[1e-9] < 0.2 * sizes[1e3]  # AdamW's epsilon makes tiny gradients count less
