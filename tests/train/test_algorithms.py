"""Real updates of a tiny policy against the same algorithms written out one sequence and one token at a time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import CPU, tiny_model_dir

from dockyard.config import ALGORITHMS, GRPOConfig, TrainerConfig
from dockyard.engine.weights import load_model
from dockyard.rl.advantage import ADVANTAGES, has_signal, std_advantage
from dockyard.rl.pack import examples_of, pack
from dockyard.rollout.blame import BY_NAME
from dockyard.trainer.policy import Policy
from dockyard.types import LIMITS, Blame, Failure, Group, Rollout, Segment

pytestmark = pytest.mark.usefixtures("one_thread")

ONE_ROW, ROW_EACH = 10_000, 64  # tokens in a micro-batch; no two of the segments below fit into 64
TIMEOUT = Failure(cause="agent_timeout", blame=Blame.POLICY, message="too slow")

OPTIONS: list[dict[str, Any]] = [
    *({"algorithm": name} for name in ALGORITHMS),
    *({"algorithm": name, "kl_coef": 0.3} for name in ("dr_grpo", "dapo")),
    {"algorithm": "gspo", "clip_low": 0.04, "clip_high": 0.06, "aggregation": "token"},
    *({"kl_coef": 0.3, "kl_type": kind} for kind in ("low_var_kl", "k1", "k2", "k3")),
    *({"aggregation": kind, "kl_coef": 0.0} for kind in ("rollout", "token")),
    {"aggregation": "constant", "constant_length": 7},
    *({"correction": level, "correction_cap": cap} for level in ("token", "sequence") for cap in (1.1, 5.0)),
    {"correction": "token", "aggregation": "token", "kl_coef": 0.3, "kl_type": "k3"},
    *({"zero_variance": "exclude", "aggregation": kind} for kind in ("rollout", "token", "constant")),
    *({"overlong": "mask", "aggregation": kind} for kind in ("rollout", "token", "constant")),
    {"overlong": "penalty", "overlong_length": 16, "overlong_buffer": 8},
    {"overlong": "penalty", "overlong_length": 20},
]


def make_policy(grpo: GRPOConfig, micro_batch_tokens: int = ONE_ROW, lr: float = 0.0) -> Policy:
    """Adapters that say something, and gradients left as they are."""
    trainer = TrainerConfig(lr=lr, lora_r=4, max_grad_norm=1e9, micro_batch_tokens=micro_batch_tokens)
    policy = Policy(load_model(tiny_model_dir(), CPU), trainer, grpo, temperature=1.0, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return policy


def make_groups() -> list[Group]:
    """Rollouts of one and of two segments, one cut short, one lost; a group without a difference; one of one."""
    rng = np.random.default_rng(5)

    def segment(prompt: list[int], length: int) -> Segment:
        sampled = np.array([False] * len(prompt) + [True] * length)
        sampled[len(prompt) + 3] = False  # a tool's word among the policy's own
        ids = np.array([*prompt, *rng.integers(3, 300, length)], np.int32)
        return Segment(token_ids=ids, sampled=sampled, logprobs=None, versions=None)

    def group(rewards: list[float | None]) -> Group:
        prompt = rng.integers(3, 300, 45).tolist()
        rollouts = [
            Rollout(
                task="t", kind="", attempt=index, reward=reward, failure=None, segments=(segment(prompt, 12 + index),)
            )
            for index, reward in enumerate(rewards)
        ]
        return Group(task="t", rollouts=tuple(rollouts))

    first = group([0.0, 1.0, 0.5, 0.0, 1.0])
    twofold = replace(first.rollouts[1], segments=(*first.rollouts[1].segments, segment([7] * 50, 13)))
    cut = replace(first.rollouts[3], failure=TIMEOUT)
    members = (first.rollouts[0], twofold, first.rollouts[2], cut, first.rollouts[4])
    return [replace(first, rollouts=members), group([1.0, 1.0]), group([1.0, None, 0.2]), group([1.0, None])]


def plain_logprobs(policy: Policy, segment: Segment) -> torch.Tensor:
    """Of the sampled tokens, in a forward pass of this segment alone."""
    ids = torch.from_numpy(segment.token_ids).long()
    logprobs = torch.log_softmax(policy.model(input_ids=ids[None], use_cache=False).logits[0], -1)
    return torch.stack([logprobs[place - 1, ids[place]] for place in np.flatnonzero(segment.sampled).tolist()])


@cache
def recorded_groups() -> list[Group]:
    """As if an engine had drawn the tokens whose probabilities differ from the policy's; one segment has none."""
    policy, groups = make_policy(GRPOConfig()), make_groups()
    rng = np.random.default_rng(6)

    def told(segment: Segment) -> Segment:
        values = np.zeros(len(segment.token_ids), np.float32)
        noise = rng.normal(rng.normal(0, 0.05), 0.25, int(segment.sampled.sum()))
        values[segment.sampled] = plain_logprobs(policy, segment).detach().numpy() + noise
        return replace(segment, logprobs=values)

    def of(rollout: Rollout) -> Rollout:
        return replace(rollout, segments=tuple(map(told, rollout.segments)))

    known = [replace(group, rollouts=tuple(map(of, group.rollouts))) for group in groups]
    silent = known[0].rollouts[2]
    silent = replace(silent, segments=(replace(silent.segments[0], logprobs=None),))
    rollouts = (*known[0].rollouts[:2], silent, *known[0].rollouts[3:])
    return [replace(known[0], rollouts=rollouts), *known[1:]]


def plain_loss(policy: Policy, groups: Sequence[Group], config: GRPOConfig) -> torch.Tensor:
    """The whole update's loss, from the textbook."""
    per_rollout: list[list[torch.Tensor]] = []  # the loss of each token of each rollout that counts
    for group in groups:
        rollouts = [rollout for rollout in group.rollouts if rollout.reward is not None]
        if len(rollouts) < 2:
            continue
        rewards = [plain_reward(rollout, config) for rollout in rollouts]
        if (config.zero_variance == "exclude" or config.dynamic_sampling) and len(set(rewards)) == 1:
            continue
        for index, rollout in enumerate(rollouts):
            advantage = plain_advantage(rewards, index, config.advantage)
            if config.overlong == "mask" and rollout.failure is TIMEOUT:
                continue
            losses: list[torch.Tensor] = []
            for segment in rollout.segments:
                losses += plain_segment(policy, segment, advantage, config)
            per_rollout.append(losses)
    if config.aggregation == "token":
        every = [loss for losses in per_rollout for loss in losses]
        return torch.stack(every).sum() / len(every)
    lengths = [len(losses) if config.aggregation == "rollout" else config.constant_length for losses in per_rollout]
    sums = [torch.stack(losses).sum() / length for losses, length in zip(per_rollout, lengths, strict=True)]
    return torch.stack(sums).sum() / len(per_rollout)


def plain_reward(rollout: Rollout, config: GRPOConfig) -> float:
    assert rollout.reward is not None
    if config.overlong != "penalty":
        return rollout.reward
    assert config.overlong_length is not None
    buffer = config.overlong_buffer or config.overlong_length // 5
    length, soft = sum(int(segment.sampled.sum()) for segment in rollout.segments), config.overlong_length - buffer
    if length <= soft:
        return rollout.reward
    return rollout.reward - 1 if length > config.overlong_length else rollout.reward + (soft - length) / buffer


def plain_advantage(rewards: list[float], index: int, kind: str) -> float:
    if kind == "leave_one_out":
        return rewards[index] - fmean(rewards[:index] + rewards[index + 1 :])
    centred = rewards[index] - fmean(rewards)
    return centred / (stdev(rewards) + 1e-6) if kind == "std" else centred


def plain_segment(policy: Policy, segment: Segment, advantage: float, config: GRPOConfig) -> list[torch.Tensor]:
    now = plain_logprobs(policy, segment)
    with torch.no_grad(), policy.model.disable_adapter():
        reference = plain_logprobs(policy, segment)
    drawn = now.detach() if segment.logprobs is None else torch.from_numpy(segment.logprobs[segment.sampled])
    old = drawn if config.correction == "none" else now.detach()
    length = len(now)
    mean_ratio = torch.exp((now - old).sum() / length)
    trust = torch.exp((now.detach() - drawn).sum()).clamp(max=config.correction_cap)
    losses: list[torch.Tensor] = []
    for t in range(length):
        ratio = mean_ratio if config.ratio == "sequence" else torch.exp(now[t] - old[t])
        clipped = min(max(ratio.item(), 1 - config.clip_low), 1 + config.clip_high)
        gain = (
            ratio * advantage if ratio.item() * advantage <= clipped * advantage else torch.tensor(clipped * advantage)
        )
        weight = {
            "none": torch.tensor(1.0),
            "token": torch.exp(now[t].detach() - drawn[t]).clamp(max=config.correction_cap),
            "sequence": trust,
        }[config.correction]
        losses.append(-gain * weight + config.kl_coef * PLAIN_KL[config.kl_type](now[t], reference[t]))
    return losses


PLAIN_KL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": lambda now, reference: now - reference,
    "k2": lambda now, reference: 0.5 * (now - reference) ** 2,
    "k3": lambda now, reference: torch.exp(reference - now) - 1 - (reference - now),
    "low_var_kl": lambda now, reference: torch.clamp(torch.exp(reference - now) - 1 - (reference - now), -10, 10),
}


def gradient(policy: Policy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


def named(options: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items())


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_an_update_has_the_loss_and_gradient_of_the_algorithm_written_out_plainly(options: dict[str, Any]):
    config = GRPOConfig(**options)
    policy = make_policy(config)
    groups = recorded_groups()
    expected = plain_loss(policy, groups, config)
    policy.model.zero_grad()
    expected.backward()
    plain = gradient(policy)
    metrics = policy.update(groups, 10)
    assert plain.norm() > 1e-3
    assert metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert (gradient(policy) - plain).norm() < 1e-5 * plain.norm()


@pytest.mark.parametrize(
    "options", [*({"algorithm": name} for name in ALGORITHMS), {"correction": "sequence"}], ids=named
)
def test_one_micro_batch_of_all_and_one_of_each_give_the_same_loss_and_gradient(options: dict[str, Any]):
    config = GRPOConfig(**options)
    whole, each = make_policy(config, ONE_ROW), make_policy(config, ROW_EACH)
    groups = recorded_groups()
    examples = examples_of(groups, config, with_idle=True)
    assert [len(pack(examples, size)) for size in (ONE_ROW, ROW_EACH)] == [1, len(examples)]
    losses = [policy.update(groups, 10)["train/loss"] for policy in (whole, each)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-7)
    assert (gradient(whole) - gradient(each)).norm() < 1e-5 * gradient(each).norm()


def test_the_algorithms_differ_from_each_other():
    losses: set[float] = set()
    for name in ALGORITHMS:
        policy = make_policy(GRPOConfig.model_validate({"algorithm": name, "kl_coef": 0.0}))
        losses.add(round(policy.update(recorded_groups(), 10)["train/loss"], 7))
    assert len(losses) == len(ALGORITHMS)


def test_the_mismatch_is_reported_whatever_the_correction():
    found: list[tuple[float, float]] = []
    for correction in ("none", "token", "sequence"):
        policy = make_policy(GRPOConfig(correction=correction))
        metrics = policy.update(recorded_groups(), 10)
        found.append((metrics["train/mismatch_kl"], metrics["train/logprob_mismatch"]))
    assert found[0][0] == pytest.approx(0.25**2 / 2, rel=0.5)  # the noise has a deviation of about a quarter
    assert found[1] == pytest.approx(found[0])
    assert found[2] == pytest.approx(found[0])


def test_advantages_of_each_kind():
    assert ADVANTAGES["mean"]([1.0, 0.0, 0.0, 0.0], ()) == [0.75, -0.25, -0.25, -0.25]
    assert ADVANTAGES["leave_one_out"]([1.0, 0.0, 0.0, 0.0], ()) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    for kind in ("std", "mean", "leave_one_out"):
        assert ADVANTAGES[kind]([0.7, 0.7], ()) == [0.0, 0.0]


def test_all_segments_of_a_rollout_have_its_one_advantage():
    group = make_groups()[0]
    [first, second] = [e for e in examples_of([group], with_idle=True) if len(e.token_ids) in (45 + 13, 50 + 13)]
    assert first.advantage == second.advantage == pytest.approx(std_advantage([0.0, 1.0, 0.5, 0.0, 1.0], ())[1])


def test_a_rollout_cut_short_is_compared_with_though_it_is_masked():
    group = make_groups()[0]
    kept, masked = (
        [(len(e.token_ids), e.advantage) for e in examples_of([group], GRPOConfig(overlong=how), with_idle=True)]
        for how in ("keep", "mask")
    )
    assert masked == [*kept[:4], *kept[5:]]
    assert set(BY_NAME) >= LIMITS


@pytest.mark.parametrize(
    ("changes", "masked"),
    [
        *(({"failure": Failure(cause=cause, blame=Blame.POLICY, message="")}, True) for cause in sorted(LIMITS)),
        ({"failure": Failure(cause="agent_crashed", blame=Blame.POLICY, message="")}, False),
        ({"stats": {"cut_at_end": 1}}, True),
        ({"stats": {"cut_at_end": 0}}, False),
    ],
)
def test_what_a_limit_ended_is_masked(changes: dict[str, Any], masked: bool):
    group = make_groups()[2]
    rollouts = (replace(group.rollouts[0], **changes), *group.rollouts[1:])
    found = examples_of([replace(group, rollouts=rollouts)], GRPOConfig(overlong="mask"), with_idle=True)
    assert len(found) == (1 if masked else 2)


def test_rollouts_that_said_nothing_count_and_segments_in_which_nothing_was_sampled_do_not():
    group = make_groups()[2]
    first, lost, last = group.rollouts
    silent = replace(last, attempt=3, segments=())
    heard = replace(first.segments[0], sampled=np.zeros_like(first.segments[0].sampled))
    members = (replace(first, segments=(heard, *first.segments)), lost, last, silent)
    found = examples_of([replace(group, rollouts=members)], GRPOConfig(), with_idle=True)
    assert [len(item.targets) for item in found] == [first.num_sampled, last.num_sampled]
    assert [item.weight for item in found] == [1 / (3 * len(item.targets)) for item in found]  # silent is the third


def test_only_recorded_tokens_tell_how_far_engine_and_trainer_are_apart():
    groups = recorded_groups()

    def mismatch(*rollouts: Rollout) -> float | None:
        group = Group(task="t", rollouts=tuple(rollouts))
        return make_policy(GRPOConfig()).update([group], 3).get("train/mismatch_kl")

    first, last, silent = groups[0].rollouts[0], groups[0].rollouts[4], groups[0].rollouts[2]
    unknown = replace(last, segments=tuple(replace(one, logprobs=None) for one in last.segments))
    assert mismatch(silent, unknown) is None
    alone = mismatch(replace(first, reward=0.3), unknown)
    assert alone
    assert mismatch(replace(first, reward=0.3), unknown, silent) == pytest.approx(alone, rel=1e-3)


def test_a_penalty_for_length_can_be_all_that_tells_rollouts_apart():
    alike = replace(make_groups()[0], rollouts=make_groups()[1].rollouts)
    penalty = GRPOConfig(overlong="penalty", overlong_length=12, overlong_buffer=2)
    assert not has_signal(alike, GRPOConfig())
    assert has_signal(alike, penalty)  # 11 and 12 tokens
    assert [rollout.reward for rollout in alike.rollouts] == [1.0, 1.0]


def test_a_skipped_update_leaves_weights_and_optimiser_as_they_were():
    groups = make_groups()
    broken = replace(groups[0], rollouts=(replace(groups[0].rollouts[0], reward=np.nan), *groups[0].rollouts[1:]))
    results: list[torch.Tensor] = []
    for between in ([], [broken]):
        policy = make_policy(GRPOConfig(kl_coef=0.0), lr=1e-2)
        policy.update(groups, 10)
        for group in between:
            assert policy.update([group], 10)["train/skipped"] == 1
        assert policy.update(groups, 10)["train/skipped"] == 0
        results.append(torch.cat([p.detach().flatten() for p in policy.model.parameters() if p.requires_grad]))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(results[0], results[1])


def test_gspo_clips_whole_segments():
    policy = make_policy(GRPOConfig(algorithm="gspo"))
    metrics = policy.update(recorded_groups(), 10)
    assert 0 < metrics["train/clip_fraction"] < 1
    assert math.isfinite(metrics["train/grad_norm"])
