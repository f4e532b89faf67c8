"""SLiME's hooks without a trial: rewards, filters, nesting, padding and the order of tasks.

`SLIME_REPO=DIR` runs the same on the classes of a SLiME checkout.
"""

import asyncio
import pickle
import sys
import traceback
from argparse import Namespace
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gateway_fakes import tiny_renderer
from scripted_router import model_folder, new_run
from slime_stand_in import DynamicFilterOutput, Sample, slime_args, train_data, unpacked

from dockyard.backends.slime import hooks
from dockyard.backends.slime.samples import adapter_name, even, step_samples
from dockyard.backends.slime.worker import WorkerKey, check_agreement, run_config
from dockyard.config import GRPOConfig, RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.settings.messages import SettingProblem, SettingsError
from dockyard.types import Blame, Failure, Group, Rollout, Segment

SEGMENT = Segment(
    token_ids=np.array([5, 6, 7, 8, 9], np.int32),
    sampled=np.array([False, False, True, False, True]),
    logprobs=np.array([0, 0, -0.5, 0, -0.25], np.float32),
    versions=np.array([-1, -1, 3, -1, 4], np.int32),
)
LOST = Failure(cause="host_error", blame=Blame.INFRASTRUCTURE, message="no disk")
SILENT = Failure(cause="agent_timeout", blame=Blame.POLICY, message="out of time")


def sample(group: int, rollout: int | None, reward: float | None, *, lost: bool = False) -> Any:
    return Sample(
        group_index=group, rollout_id=rollout, reward=reward, remove_sample=lost, response_length=1, loss_mask=[1]
    )


def rollout(
    attempt: int, reward: float | None, *segments: Segment, task: str = "t", failure: Failure | None = None
) -> Rollout:
    return Rollout(task=task, kind="", attempt=attempt, segments=segments, reward=reward, failure=failure)


def batch(*groups: tuple[Rollout, ...], size: int = 2, num_groups: int | None = None, step: int = 0) -> list[Any]:
    config = RunConfig(grpo=GRPOConfig(group_size=size, tasks_per_step=num_groups or len(groups)))
    made = [Group(task=group[0].task, rollouts=group) for group in groups]
    return even(step_samples(made, step, config, tiny_renderer()))


def test_advantages_go_by_group_and_count_each_rollout_once():
    samples = [
        *(sample(0, 0, 1.0), sample(0, 0, 1.0), sample(0, 0, 1.0), sample(0, 1, 0.0), sample(0, 2, 0.0)),
        *(sample(1, 4, 1.0), sample(0, 3, 0.0), sample(1, 5, 0.0)),  # a group need not be together
    ]
    raw, advantages = hooks.reward_post_process(None, samples)
    assert raw == [1, 1, 1, 0, 0, 1, 0, 0]
    assert advantages == pytest.approx([1.5, 1.5, 1.5, -0.5, -0.5, 0.7071, -0.5, -0.7071], abs=1e-4)


def test_lost_rollouts_move_no_mean_and_a_rollout_alone_trains_nothing():
    samples = [sample(0, 0, 1.0), sample(0, 1, 0.0), sample(0, 2, 0.0, lost=True), sample(1, 3, 1.0)]
    samples.append(sample(1, 4, 0.0, lost=True))
    _, advantages = hooks.reward_post_process(None, samples)
    assert advantages == pytest.approx([0.7071, -0.7071, 0, 0, 0], abs=1e-4)
    assert [one.remove_sample for one in samples] == [False, False, True, True, True]


def test_samples_that_name_no_rollout_are_rollouts_of_their_own():
    _, advantages = hooks.reward_post_process(None, [sample(0, None, 1.0), sample(0, None, 0.0)])
    assert advantages == pytest.approx([0.7071, -0.7071], abs=1e-4)


def test_siblings_with_different_rewards_are_an_error():
    with pytest.raises(DockyardError, match="rollout 7 have the rewards 1.0 and 0.0"):
        hooks.reward_post_process(None, [sample(0, 7, 1.0), sample(0, 7, 0.0)])


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"), [([1, 0], True, None), ([1, 1], False, "all_1.0"), ([None, None], False, "all_None")]
)
@pytest.mark.parametrize("nested", [False, True])
def test_the_filter_drops_what_teaches_nothing_but_never_too_much(
    rewards: list[float | None], keep: bool, reason: str | None, nested: bool
):
    entries = [sample(0, number, reward, lost=reward is None) for number, reward in enumerate(rewards)]
    output = hooks.keep_informative(None, [[entry, entry] for entry in entries] if nested else entries)
    assert isinstance(output, DynamicFilterOutput)
    assert (output.keep, output.reason, output.keep_when_insufficient) == (keep, reason, True)


def test_a_batch_is_nested_as_soon_as_one_rollout_has_two_samples():
    one, two = rollout(0, 1.0, SEGMENT), rollout(1, 0.0, SEGMENT, SEGMENT)
    assert [type(entry) for entry in batch((one, one))[0]] == [Sample, Sample]
    mixed = batch((one, one), (one, two))
    assert [[len(entry) for entry in group] for group in mixed] == [[1, 1], [1, 2]]
    assert [made.rollout_id for made in unpacked(mixed)] == [0, 1, 2, 3, 3]
    assert [made.index for made in unpacked(mixed)] == [0, 1, 2, 3, 4]


def test_a_sample_holds_what_was_drawn_after_the_first_prompt():
    [[made, _]] = batch((rollout(0, 0.5, SEGMENT), rollout(1, None, failure=LOST)), step=2)
    assert (made.tokens, made.response_length) == ([5, 6, 7, 8, 9], 3)
    assert made.loss_mask == [1, 0, 1]
    assert made.rollout_log_probs == [-0.5, 0.0, -0.25]
    assert made.weight_versions == ["3", "4"]
    assert (made.group_index, made.rollout_id, made.reward) == (2, 4, 0.5)
    assert made.status is Sample.Status.COMPLETED


def test_lost_rollouts_and_those_without_a_token_keep_their_place():
    lost, silent = rollout(0, None, SEGMENT, failure=LOST), rollout(1, 0.0, failure=SILENT)
    samples = unpacked(batch((lost, silent)))
    for made in samples:
        assert (made.tokens, made.response_length, made.loss_mask, made.rollout_log_probs) == ([0, 0], 1, [0], [0.0])
    assert [made.remove_sample for made in samples] == [True, False]  # the silent one's 0 counts in the mean
    assert [made.status for made in samples] == [Sample.Status.ABORTED, Sample.Status.TRUNCATED]
    assert samples[0].metadata["failure"]["cause"] == "host_error"
    data = train_data(None, samples, hooks.reward_post_process)
    assert data["rollout_mask_sums"] == [0, 0]


def test_the_short_last_step_of_a_pass_is_filled_with_what_trains_nothing():
    groups = batch((rollout(0, 1.0, SEGMENT), rollout(1, 0.0, SEGMENT)), num_groups=3)
    assert [len(group) for group in groups] == [2, 2, 2]
    samples = unpacked(groups)
    assert [made.remove_sample for made in samples] == [False, False, True, True, True, True]
    _, advantages = hooks.reward_post_process(None, samples)
    assert advantages == pytest.approx([0.7071, -0.7071, 0, 0, 0, 0], abs=1e-4)


@pytest.fixture
def args(tmp_path: Path) -> Generator[Namespace]:
    tasks = {"source": "demo", "num_train": 5, "num_heldout": 4}
    with new_run(tmp_path / "run", tasks=tasks, grpo={"group_size": 2, "tasks_per_step": 2}) as run:
        yield slime_args(run.path, "http://127.0.0.1:1", model_folder())


def tasks_in(groups: list[list[Any]]) -> list[str]:
    assert all(made.metadata["task"] == group[0].label for group in groups for made in group)
    return [group[0].label for group in groups]


def test_the_data_source_gives_every_task_once_before_any_again(args: Namespace):
    source = hooks.SlimeDataSource(args)
    assert len(source) == 5
    groups = source.get_samples(3) + source.get_samples(7)
    names = tasks_in(groups)
    assert sorted(names[:5]) == sorted(names[5:]) == sorted(set(names))
    assert [(made.group_index, made.index, made.metadata["attempt"]) for made in groups[4]] == [(4, 8, 0), (4, 9, 1)]
    assert all(made.status is Sample.Status.PENDING for group in groups for made in group)


def test_a_resumed_data_source_goes_on_where_it_was_saved(args: Namespace):
    source, other = hooks.SlimeDataSource(args), hooks.SlimeDataSource(args)
    first = source.get_samples(3)
    source.add_samples([first[1]])
    source.save(4)
    expected = tasks_in(source.get_samples(4))
    other.load(-1)
    assert tasks_in(other.get_samples(3)) == tasks_in(first)
    other.load(4)
    assert tasks_in(other.get_samples(4)) == expected
    assert expected[0] == tasks_in(first)[1]
    with pytest.raises(DockyardError, match="dockyard_tasks_5.json"):
        other.load(5)


def test_a_step_that_had_begun_before_the_one_ahead_of_it_was_saved_is_not_skipped(tmp_path: Path):
    settings = {"tasks": {"source": "demo", "num_train": 8, "num_heldout": 4}, "rollout": {"max_staleness": 1}}
    with new_run(tmp_path / "run", **settings) as run:
        args = slime_args(run.path, "http://127.0.0.1:1", model_folder(), num_rollout=3)
    source, resumed = hooks.SlimeDataSource(args), hooks.SlimeDataSource(args)
    source.get_samples(2)
    source.get_samples(2)
    source.save(0)  # as `train_async.py` does: behind the generation of step 1
    resumed.load(0)
    assert [group[0].group_index for group in resumed.get_samples(2)] == [2, 3]
    source.get_samples(2)
    source.save(1)
    source.save(2)  # the last step has none behind it
    for step, first in ((1, 4), (2, 6)):
        resumed.load(step)
        assert resumed.get_samples(1)[0][0].group_index == first


def test_slimes_own_loop_is_stopped_when_too_much_is_lost(args: Namespace):
    lost, made = sample(0, 0, 0.0, lost=True), sample(0, 1, 1.0)
    hooks.even_out(args, [[lost, made]])
    with pytest.raises(DockyardError, match="2 of 3 rollouts were lost"):
        hooks.even_out(args, [[lost, made], [Sample(group_index=1, rollout_id=2)]])


def test_uneven_batches_of_slimes_own_loop_are_made_even(args: Namespace):
    groups: list[Any] = [[sample(0, 0, 1.0), [sample(0, 1, 1.0), sample(0, 1, 1.0)]]]
    hooks.even_out(args, groups)
    assert [made.rollout_id for made in unpacked(groups)] == [0, 1, 1]


async def test_a_rollout_that_slimes_full_batch_has_no_use_for_is_cancelled(monkeypatch: pytest.MonkeyPatch):
    loop: Any = ModuleType("slime.rollout.sglang_rollout")
    loop.GenerateState = lambda args: Namespace(aborted=True)
    ended = asyncio.Event()

    async def endless() -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setitem(sys.modules, loop.__name__, loop)
    monkeypatch.setattr(hooks, "_WATCH_S", 0.01)
    assert await hooks._while_needed(None, endless()) is None
    await asyncio.wait_for(ended.wait(), 60)


@pytest.mark.parametrize("error", [UsageError("m", hint="h"), SettingsError([SettingProblem("m", "h")])])
def test_errors_reach_slimes_driver_from_its_rollout_process(error: DockyardError):
    there = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(there), str(there), there.message, there.hint) == (type(error), "m", "m", "h")
    assert "hint: h\n" in traceback.format_exception(there)


def test_arguments_that_are_missing_are_named(args: Namespace):
    with pytest.raises(UsageError, match="--custom-config-path"):
        hooks.SlimeDataSource(Namespace())
    with pytest.raises(UsageError, match="--rollout-max-context-len"):
        WorkerKey.of(Namespace(**{**vars(args), "rollout_max_context_len": None}))


def test_arguments_that_were_changed_by_hand_are_refused(args: Namespace):
    config = run_config(args)
    check_agreement(args, config)
    args.n_samples_per_prompt = 8
    with pytest.raises(UsageError, match="`--n-samples-per-prompt 8`; the run's `grpo.group_size` is 2"):
        check_agreement(args, config)


def test_miles_keeps_every_group_and_names_its_adapter(monkeypatch: pytest.MonkeyPatch):
    @dataclass
    class MilesOutput:
        keep: bool
        reason: str | None = None

    def add(name: str, **content: Any) -> None:
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

    add("miles")
    add("miles.utils")
    add("miles.utils.lora", LORA_ADAPTER_NAME="miles_lora", lora_rollout_enabled=lambda args: args.lora_rank > 0)
    add("miles.rollout")
    add("miles.rollout.filter_hub")
    add("miles.rollout.filter_hub.base_types", DynamicFilterOutput=MilesOutput)
    assert hooks.keep_informative(None, [sample(0, 0, 1.0), sample(0, 1, 1.0)]) == MilesOutput(keep=True)
    assert [adapter_name(Namespace(lora_rank=rank)) for rank in (0, 8)] == [None, "miles_lora"]
