"""Advantage, loss and reward functions of the user's in real updates and real runs, and the examples of them."""

import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gateway_fakes import tiny_renderer
from killable_runs import GROUP_SIZE, TASKS_PER_STEP, adapter, settings, write_tasks
from tiny_policy import CPU, make_group, tiny_model_dir

import dockyard
from dockyard.config import GRPOConfig, RunConfig, TrainerConfig
from dockyard.engine.weights import load_model
from dockyard.errors import DockyardError, UsageError
from dockyard.rl.functions import check_functions
from dockyard.rl.loss import Batch, Loss, batch_loss, load_loss
from dockyard.rl.pack import Example, examples_of, pack
from dockyard.rl.reward import open_shaping
from dockyard.rl.trees import plant
from dockyard.rollout.plan import Attempt, RolloutPlan
from dockyard.rollout.pool import RolloutPool
from dockyard.run_dir.records import RecordedRollout
from dockyard.run_dir.run import RunDir, read_recorded
from dockyard.trainer.display import TrainingProgress
from dockyard.trainer.loop import TaskRollouts
from dockyard.trainer.policy import Policy
from dockyard.types import Group, Rollout, Segment, Task

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning"),
    pytest.mark.usefixtures("one_thread"),
]

EXAMPLES = Path(__file__).parents[2] / "examples" / "extend"
RIGHT = "def loss(batch: Batch, config: GRPOConfig) -> Loss"
COPY = """
import torch
from dockyard.rl.loss import Loss

calls = 0

def loss(batch, config):
    global calls
    calls += 1
    ratio = (batch.logprobs_N - batch.old_N).exp()
    free = -ratio * batch.advantages_N
    bounded = -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * batch.advantages_N
    log_ratio = batch.reference_N - batch.logprobs_N
    kl = (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)
    total = (batch.weights_N * (torch.maximum(free, bounded) + config.kl_coef * kl)).sum()
    return Loss(total=total, clipped_N=(bounded > free).float(), kl_N=kl)
"""
"""GRPO's own loss, written out."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, and modules that are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_") or name in ("advantage", "loss", "reward"):
            del sys.modules[name]


def policy_of(*, micro_batch_tokens: int = 10_000, lr: float = 1e-2, **grpo: Any) -> Policy:
    trainer = TrainerConfig(lr=lr, lora_r=4, max_grad_norm=1e9, micro_batch_tokens=micro_batch_tokens)
    config = GRPOConfig.model_validate({"kl_coef": 0.0, **grpo})
    policy = Policy(load_model(tiny_model_dir(), CPU), trainer, config, temperature=1.0, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return policy


def weights_of(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters() if p.requires_grad])


def trained(groups: Sequence[Group], steps: int = 3, **settings: Any) -> tuple[torch.Tensor, list[dict[str, float]]]:
    policy = policy_of(**settings)
    metrics = [policy.update(groups, num_steps=steps) for _ in range(steps)]
    return weights_of(policy), metrics


def with_logprobs(group: Group, shift: float) -> Group:
    """Recorded by an engine that found every token `shift` nats more likely than the policy does."""
    policy = policy_of()
    rollouts: list[Rollout] = []
    for rollout in group.rollouts:
        [segment] = rollout.segments
        targets = np.flatnonzero(segment.sampled).astype(np.int32)
        example = Example(token_ids=segment.token_ids, targets=targets, old_logprobs=None, advantage=0.0, weight=1.0)
        [row] = pack([example], 10_000)
        known = np.zeros(len(segment.token_ids), np.float32)
        with torch.no_grad():
            known[targets] = policy.logprobs(row).numpy() + shift
        rollouts.append(replace(rollout, segments=(replace(segment, logprobs=known),)))
    return replace(group, rollouts=tuple(rollouts))


GROUPS = [make_group([1.0, 0.0, 0.5, 0.25])]


@pytest.mark.parametrize("micro_batch_tokens", [64, 10_000])
def test_a_copy_of_the_built_in_loss_trains_the_same_bits(here: Path, micro_batch_tokens: int):
    (here / "my_copy.py").write_text(COPY)
    options = {"micro_batch_tokens": micro_batch_tokens, "kl_coef": 0.1}
    mine, my_metrics = trained(GROUPS, loss="my_copy:loss", **options)
    built_in, metrics = trained(GROUPS, **options)
    assert torch.equal(mine, built_in)
    assert my_metrics == metrics
    assert metrics[0]["train/kl"] > 0
    assert sys.modules["my_copy"].calls >= 3


def test_the_loss_of_the_example_is_the_policy_gradient_while_nothing_is_clipped():
    """CISPO and GRPO have the same gradient as long as every ratio is 1."""
    groups = [with_logprobs(GROUPS[0], 0.0)]
    mine, _ = trained(groups, steps=1, loss="loss:loss")
    built_in, _ = trained(groups, steps=1)
    assert torch.allclose(mine, built_in, atol=1e-6)
    assert not torch.allclose(mine, weights_of(policy_of()), atol=1e-4)


def test_the_loss_of_the_example_learns_from_tokens_that_clipping_would_drop():
    groups = [with_logprobs(GROUPS[0], -1.0)]  # every ratio is e, far beyond 1.28
    mine, my_metrics = trained(groups, steps=1, loss="loss:loss")
    _, metrics = trained(groups, steps=1)
    assert my_metrics[0]["train/clip_fraction"] == 1.0
    assert 0 < metrics[0]["train/clip_fraction"] < 1
    expected, _ = trained([with_logprobs(GROUPS[0], 0.0)], steps=1, loss="loss:loss")
    assert torch.allclose(mine, expected, atol=1e-4), "AdamW's first step does not depend on a constant factor"


def long_prefix_group() -> Group:
    """Rollouts that share a prompt which is long enough for a pass of its own."""
    rng = np.random.default_rng(7)
    prompt = rng.integers(3, 300, 400).tolist() * 2
    rollouts: list[Rollout] = []
    for index, reward in enumerate([1.0, 0.0, 0.5, 0.2]):
        sampled = rng.integers(3, 300, 60 + index).tolist()
        segment = Segment(
            token_ids=np.array([*prompt, *sampled], np.int32),
            sampled=np.array([False] * len(prompt) + [True] * len(sampled)),
            logprobs=None,
            versions=None,
        )
        rollouts.append(Rollout(task="t", kind="", attempt=index, segments=(segment,), reward=reward, failure=None))
    return Group(task="t", rollouts=tuple(rollouts))


def test_a_loss_of_the_users_is_the_same_however_the_update_is_divided():
    """In one row, in rows that share a prefix computed once, and in the gradients of each."""
    group = long_prefix_group()
    config = GRPOConfig(loss="loss:loss", kl_coef=0.0)
    assert [bool(len(tree.prefix)) for tree in plant(examples_of([group], config, with_idle=True), 128)] == [True]
    whole, whole_metrics = trained([group], steps=2, loss="loss:loss")
    divided, divided_metrics = trained([group], steps=2, loss="loss:loss", micro_batch_tokens=128)
    assert torch.allclose(whole, divided, atol=1e-4)
    for one, other in zip(whole_metrics, divided_metrics, strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4)
    assert not torch.allclose(whole, weights_of(policy_of()), atol=1e-3)


def test_a_loss_of_the_users_also_sees_rollouts_without_an_advantage(here: Path):
    """It may reinforce whatever was sampled: then a group in which all are alike has a gradient as well."""
    (here / "my_sft.py").write_text(
        "import torch\nfrom dockyard.rl.loss import Loss\n"
        "def loss(batch, config):\n"
        "    zeros_N = torch.zeros_like(batch.weights_N)\n"
        "    total = -(batch.weights_N * batch.logprobs_N).sum()\n"
        "    return Loss(total=total, clipped_N=zeros_N, kl_N=zeros_N)\n"
    )
    alike = [make_group([1.0, 1.0])]
    _, metrics = trained(alike, steps=8, loss="my_sft:loss")
    assert metrics[-1]["train/mean_logprob"] > metrics[0]["train/mean_logprob"] + 0.1
    _, built_in = trained(alike, steps=1)
    assert built_in[0]["train/tokens"] == 0


def a_batch() -> Batch:
    def ones() -> torch.Tensor:
        return torch.full((3,), -1.0)

    return Batch(
        logprobs_N=ones().requires_grad_(),
        old_N=ones(),
        recorded_N=ones(),
        reference_N=None,
        advantages_N=ones(),
        weights_N=ones(),
        segments_N=torch.zeros(3, dtype=torch.long),
    )


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("1.0", "returned `1.0`, which is not a `Loss`"),
        ("batch.logprobs_N.sum()", "which is not a `Loss`"),
        ("Loss(total=3.0, clipped_N=x, kl_N=x)", "whose `total` is `3.0`, not a tensor"),
        ("Loss(total=batch.logprobs_N, clipped_N=x, kl_N=x)", r"whose `total` has the shape \(3,\) instead of \(\)"),
        ("Loss(total=batch.logprobs_N.sum(), clipped_N=x[:2], kl_N=x)", r"`clipped_N` has the shape \(2,\) instead of"),
        ("Loss(total=batch.logprobs_N.sum(), clipped_N=x, kl_N=x.sum())", r"`kl_N` has the shape \(\) instead of"),
        ("Loss(total=batch.logprobs_N.detach().sum(), clipped_N=x, kl_N=x)", "whose `total` has no gradient"),
        (
            "Loss(total=x.clone().requires_grad_().sum(), clipped_N=x, kl_N=x)",
            "whose `total` does not depend on `batch.logprobs_N`",
        ),
    ],
)
def test_a_result_that_is_no_loss_is_an_error_that_names_the_function(here: Path, result: str, says: str):
    code = (
        f"from dockyard.rl.loss import Loss\ndef loss(batch, config):\n    x = batch.weights_N\n    return {result}\n"
    )
    (here / "my_wrong.py").write_text(code)
    config = GRPOConfig(loss="my_wrong:loss")
    with pytest.raises(DockyardError, match=says) as error:
        load_loss(config)(a_batch(), config)
    assert error.value.message.startswith("`grpo.loss` is `my_wrong:loss`, which returned")


@pytest.mark.parametrize("code", ["def loss(batch): ...", "loss = 1", "async def loss(batch, config): ..."])
def test_a_loss_with_a_wrong_signature_is_refused_with_the_right_one(here: Path, code: str):
    (here / "my_wrong.py").write_text(code)
    with pytest.raises(UsageError, match="`grpo.loss` is `my_wrong:loss`") as error:
        check_functions(GRPOConfig(loss="my_wrong:loss"), remote=False)
    assert error.value.hint == f"define `{RIGHT}`"


def test_a_loss_that_raises_is_named_with_the_line(here: Path):
    (here / "my_wrong.py").write_text("def loss(batch, config):\n    return batch.logits_N\n")
    with pytest.raises(DockyardError, match=r"`my_wrong:loss`, which failed on a batch of .*my_wrong.py:2"):
        trained(GROUPS, steps=1, loss="my_wrong:loss")


def test_memory_that_a_loss_lacks_is_not_taken_for_a_mistake_of_the_function(here: Path):
    """It is tried again with fewer activations where that is possible, as with the built-in loss."""
    (here / "my_large.py").write_text(
        "import torch\ndef loss(batch, config):\n    raise torch.OutOfMemoryError('no memory')\n"
    )
    with pytest.raises(DockyardError, match="a row of 38 tokens does not fit the GPU's memory: no memory"):
        trained(GROUPS, steps=1, loss="my_large:loss")


def test_the_built_in_loss_is_called_without_a_check():
    assert load_loss(GRPOConfig()) is batch_loss
    assert isinstance(load_loss(GRPOConfig())(a_batch(), GRPOConfig()), Loss)


def test_the_advantage_of_the_example_changes_what_is_reinforced():
    """With a baseline at the 40 % quantile two of these are better than it, where the mean has only one above."""
    rewards = [1.0, 0.2, 0.1, 0.0]
    group = make_group([*rewards])
    config = GRPOConfig(advantage="advantage:advantage")
    found = {len(e.token_ids): e.advantage for e in examples_of([group], config, with_idle=True)}
    assert [math.copysign(1, found[length]) for length in sorted(found)] == [1, 1, -1, -1]
    mine, _ = trained([group], advantage="advantage:advantage")
    assert not torch.allclose(mine, trained([group])[0], atol=1e-4)
    assert examples_of([make_group([0.5, 0.5])], config, with_idle=False) == []


STEPS, NUM_HELDOUT = 2, 2
# The verifier finds nothing solved. Its report says that some of seven tests pass, as many as the length of what was
# said gives.
TEST_SH = """echo 0 > /logs/verifier/reward.txt
passed=$(( $(wc -c < /app/reply.txt) % 7 ))
echo "{\\"results\\": {\\"summary\\": {\\"tests\\": 7, \\"passed\\": $passed}}}" > /logs/verifier/ctrf.json
"""


def run_settings(folder: Path, **changed: Any) -> dict[str, Any]:
    values = settings(folder, STEPS)
    write_tasks(folder / "heldout", NUM_HELDOUT)
    for script in folder.glob("*/task-*/tests/test.sh"):
        script.write_text(TEST_SH)
    return {**values, "tasks.heldout": folder / "heldout", "grpo.kl_coef": 0.0, **changed}


def recorded(run: dockyard.Run, phase: str) -> list[RecordedRollout]:
    return read_recorded(run.path / "rollouts" / f"{phase}.jsonl")


def test_a_run_trains_with_the_reward_of_the_example_and_reports_the_verifiers(here: Path):
    config = run_settings(here)
    shaped = dockyard.train(config, run_dir="shaped", grpo={"reward": "reward:reward"})
    plain = dockyard.train(config, run_dir="plain")

    for step in range(STEPS):
        items = recorded(shaped, f"step-{step:05}")
        assert len(items) == TASKS_PER_STEP * GROUP_SIZE
        for item in items:
            trial = shaped.path / "trials" / f"step-{step:05}-{item.group:03}-{item.rollout.attempt:02}"
            report = json.loads((trial / "verifier/ctrf.json").read_text())["results"]["summary"]
            expected = 0.5 * report["passed"] / 7 - 0.1 * item.rollout.cut_short
            assert item.rollout.reward == 0
            assert item.rollout.shaped_reward == pytest.approx(expected)
    for phase in ("eval-before", "eval-after"):
        assert [item.rollout.shaped_reward for item in recorded(shaped, phase)] == [None] * NUM_HELDOUT
    metrics = shaped.metrics(as_="arrow").to_pylist()
    assert [line["reward/mean"] for line in metrics] == [0.0] * STEPS
    assert all(line["reward/shaped_mean"] > 0 for line in metrics)
    assert "reward/shaped_mean" not in plain.metrics(as_="arrow").column_names
    assert "shaped_reward" in shaped.rollouts(as_="arrow").column_names
    assert "shaped_reward" not in plain.rollouts(as_="arrow").column_names

    assert all(line["train/tokens"] > 0 for line in metrics)
    plain_metrics = plain.metrics(as_="arrow").to_pylist()
    assert [line["train/tokens"] for line in plain_metrics] == [0.0] * STEPS, "all that the verifier said is 0"
    assert adapter(shaped.path, STEPS) != adapter(plain.path, STEPS)
    assert shaped.summary is not None
    assert plain.summary is not None
    assert shaped.summary["rewards"] == plain.summary["rewards"] == [0.0] * STEPS


MOODY = """
from pathlib import Path

def reward(rollout):
    calls = Path("calls")
    text = calls.read_text() if calls.exists() else ""
    calls.write_text(text + "x")
    return (len(text) * 7 + rollout.attempt) % 5
"""
"""What it returns depends on how often it was called."""


def test_a_resumed_run_replays_the_rewards_that_were_recorded(here: Path):
    """Also where the function would now return something else: it is called once for each rollout."""
    (here / "my_moody.py").write_text(MOODY)
    config = run_settings(here) | {"rollout.concurrency": 1}
    whole = dockyard.train(config, run_dir="whole", grpo={"reward": "my_moody:reward"})
    assert len((here / "calls").read_text()) == STEPS * TASKS_PER_STEP * GROUP_SIZE
    shutil.copytree(whole.path, here / "again", ignore=shutil.ignore_patterns("checkpoints", "adapters", "metrics*"))
    again = dockyard.train(resume=here / "again")
    assert len((here / "calls").read_text()) == STEPS * TASKS_PER_STEP * GROUP_SIZE
    assert adapter(again.path, STEPS) == adapter(whole.path, STEPS)
    for name in ("reward/shaped_mean", "train/loss"):
        assert again.metrics(as_="arrow")[name].to_pylist() == whole.metrics(as_="arrow")[name].to_pylist()


def test_a_resumed_run_keeps_its_functions(here: Path):
    (here / "my_moody.py").write_text(MOODY)
    run = dockyard.train(run_settings(here, steps=0), run_dir="run", grpo={"reward": "my_moody:reward"})
    with pytest.raises(UsageError, match="grpo.reward"):
        dockyard.train(resume=run.path, grpo={"reward": "my_other:reward"})


def test_a_reward_function_that_fails_stops_the_run_and_the_fixed_one_continues_it(here: Path):
    last = TASKS_PER_STEP * GROUP_SIZE  # of the step: no other rollout is in progress
    (here / "my_late.py").write_text(
        "seen = []\n"
        "def reward(rollout):\n"
        "    seen.append(rollout)\n"
        f"    return float(rollout.attempt) if len(seen) < {last} else 'last'\n"
    )
    config = run_settings(here) | {"rollout.concurrency": 1}
    with pytest.raises(DockyardError) as error:
        dockyard.train(config, run_dir="run", grpo={"reward": "my_late:reward"})
    assert "`grpo.reward` is `my_late:reward`, which returned `'last'` for rollout `step-00000-" in error.value.message
    kept = read_recorded(here / "run/rollouts/step-00000.jsonl")
    assert len(kept) == last - 1
    (here / "my_late.py").write_text("def reward(rollout): return float(rollout.attempt)\n")
    del sys.modules["my_late"]
    run = dockyard.train(resume=here / "run")
    items = recorded(run, "step-00000")
    assert [item.rollout.shaped_reward for item in items] == [float(item.rollout.attempt) for item in items]
    assert len(items) == last


@pytest.mark.parametrize("setting", ["advantage", "loss", "reward"])
def test_a_function_that_cannot_be_called_ends_a_run_before_it_begins(here: Path, setting: str):
    (here / "my_wrong.py").write_text(f"def {setting}(): ...")
    with pytest.raises(UsageError, match=f"`grpo.{setting}` is `my_wrong:{setting}`, whose signature is") as error:
        dockyard.train(run_settings(here), run_dir="run", grpo={setting: f"my_wrong:{setting}"})
    assert error.value.hint.startswith(f"define `def {setting}(")
    assert not (here / "run/config.toml").exists()


def test_a_run_trains_with_all_three_examples(here: Path, monkeypatch: pytest.MonkeyPatch):
    """From the root of the repository, as their docstrings say."""
    functions = {name: f"examples.extend.{name}:{name}" for name in ("advantage", "loss", "reward")}
    monkeypatch.syspath_prepend(EXAMPLES.parents[1])
    run = dockyard.train(run_settings(here), run_dir="run", grpo=functions)
    metrics = run.metrics(as_="arrow").to_pylist()
    assert all(line["train/tokens"] > 0 and line["train/grad_norm"] > 0 for line in metrics)


class DullRunner:
    """Every rollout has the same verified reward."""

    async def run(self, attempt: Attempt) -> Rollout:
        return Rollout(task=attempt.task.name, kind="", attempt=attempt.index, segments=(), reward=1.0, failure=None)


async def test_dynamic_sampling_looks_at_shaped_rewards_and_evaluations_are_not_shaped(here: Path):
    (here / "my_own.py").write_text("def reward(rollout): return rollout.attempt\n")
    tasks = [Task(name=f"task-{index}", path=Path("t"), kind="") for index in range(6)]
    for shapes in (True, False):
        reward = {"reward": "my_own:reward"} if shapes else {}
        grpo = {"group_size": 2, "tasks_per_step": 2, "dynamic_sampling": True, **reward}
        config = RunConfig.model_validate({"steps": 1, "grpo": grpo})
        with RunDir.create(here / f"run-{shapes}", config) as run:
            pool = RolloutPool(runner=DullRunner(), run=run, config=config.rollout, transcribe=lambda _: "")
            shaping = open_shaping(config.grpo, tiny_renderer(), run.paths.trials)
            rollouts = TaskRollouts(
                pool=pool, tasks=tasks, config=config, progress=TrainingProgress(1), shaping=shaping
            )
            groups = await rollouts.collect(0)
            plan = RolloutPlan(phase="eval-before", tasks=tasks, group_size=1, temperature=1.0, seed=0, stream="eval")
            evaluated = await rollouts.gather(plan, "evaluation")
        assert len(groups) == (2 if shapes else 6)
        assert [rollout.shaped_reward for rollout in groups[0].rollouts] == ([0.0, 1.0] if shapes else [None, None])
        assert [rollout.reward for rollout in groups[0].rollouts] == [1.0, 1.0]
        assert all(rollout.shaped_reward is None for group in evaluated for rollout in group.rollouts)
