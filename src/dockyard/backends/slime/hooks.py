"""The functions that SLiME calls, by dotted path. Miles, its fork, takes the same functions.

    --rollout-function-path            generate_rollout, or generate_rollout_async for `train_async.py`
    --custom-reward-post-process-path  reward_post_process, always
    --data-source-path                 SlimeDataSource, always

SLiME's own loop, which can draw more groups than it needs, runs one rollout at a time instead:

    --custom-generate-function-path    generate
    --rollout-sample-filter-path       even_out, always with it
    --dynamic-sampling-filter-path     keep_informative, if wanted
    --eval-function-path               generate_rollout

Advantages are computed here: SLiME by itself groups by position, counts segments as rollouts, and counts a lost rollout
as a reward of 0.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from dockyard.backends.slime.classes import (
    SampleEntry,
    SlimeSample,
    eval_output,
    filter_output,
    is_batch_full,
    train_output,
)
from dockyard.backends.slime.samples import even, flat, rollout_samples, step_samples
from dockyard.backends.slime.task_source import SlimeDataSource
from dockyard.backends.slime.worker import RolloutWorker, WorkerKey, check_agreement, run_config
from dockyard.convert.samples import SampleNumbers, SampleStatus
from dockyard.errors import DockyardError, UsageError
from dockyard.rl.advantage import group_advantages
from dockyard.rl.statistics import rollout_metrics
from dockyard.types import Group, Rollout


@dataclass(slots=True)
class ScoredSample:
    """A group's rollouts that have a reward."""

    rewards: dict[int, float] = field(default_factory=dict[int, float])
    """By rollout."""

    @property
    def comparable(self) -> bool:
        return len(self.rewards) > 1

    @property
    def differs(self) -> bool:
        return len(set(self.rewards.values())) > 1

    def advantages(self) -> dict[int, float]:
        """By rollout."""
        return dict(zip(self.rewards, group_advantages([*self.rewards.values()]), strict=True))


def scored_groups(samples: Sequence[SlimeSample]) -> dict[int | None, ScoredSample]:
    """By group. Samples that are to be left out are of lost rollouts."""
    groups: dict[int | None, ScoredSample] = {}
    for place, sample in enumerate(samples):
        group = groups.setdefault(sample.group_index, ScoredSample())
        if sample.remove_sample or sample.reward is None:
            continue
        reward, rollout = float(sample.reward), rollout_of(sample, place)
        if group.rewards.setdefault(rollout, reward) != reward:
            raise DockyardError(
                f"the samples of rollout {rollout} have the rewards {group.rewards[rollout]} and {reward}",
                hint="all samples of a rollout carry its reward; does a hook of yours change them?",
            )
    return groups


def rollout_of(sample: SlimeSample, place: int) -> int:
    """Whose sample it is; one that does not say is a rollout of its own, which gets a number that no other has."""
    return -1 - place if sample.rollout_id is None else sample.rollout_id


__all__ = [
    "SlimeDataSource",
    "even_out",
    "generate",
    "generate_rollout",
    "generate_rollout_async",
    "keep_informative",
    "reward_post_process",
]

_WATCH_S = 1.0
_crews: dict[WorkerKey, RolloutWorker] = {}
_opening = threading.Lock()


def crew_of(args: Any) -> RolloutWorker:
    """Those who make rollouts in this process, from the first call on."""
    post = WorkerKey.of(args)
    with _opening:
        if post not in _crews:
            check_agreement(args, run_config(args))
            _crews[post] = RolloutWorker(post)
        return _crews[post]


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A step's groups, or an evaluation on the held-out tasks. Tasks follow from `rollout_id` alone."""
    return _evaluate(args, rollout_id) if evaluation else _collect(args, rollout_id, ahead=0)


def generate_rollout_async(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The same for `train_async.py`, whose rollouts are one update old by themselves.

    Further steps are begun early, so that no rollout is older than `rollout.max_staleness` updates.
    """
    if evaluation:
        return _evaluate(args, rollout_id)
    return _collect(args, rollout_id, ahead=max(crew_of(args).config.rollout.max_staleness - 1, 0))


def _collect(args: Any, step: int, *, ahead: int) -> Any:
    if args.dynamic_sampling_filter_path or args.rollout_sample_filter_path:
        hint = "`--custom-generate-function-path dockyard.backends.slime.hooks.generate` runs in SLiME's own loop"
        raise UsageError("SLiME's filters have no effect beside this `--rollout-function-path`", hint=hint)
    crew = crew_of(args)
    groups = crew.collect(step, ahead=ahead)
    metrics = rollout_metrics(_rollouts(groups))
    crew.run.record_metrics(step, metrics)
    return train_output(even(step_samples(groups, step, crew.config, crew.renderer)), metrics)


def _evaluate(args: Any, rollout_id: int) -> Any:
    """Each rollout counts once, and one that is lost does not."""
    crew = crew_of(args)
    rollouts = [rollout for rollout in _rollouts(crew.evaluate(rollout_id)) if rollout.reward is not None]
    if not rollouts:
        raise DockyardError("every rollout of the evaluation was lost", hint="`dockyard doctor` checks this machine")
    numbers = SampleNumbers()
    samples = [rollout_samples(rollout, rollout.task, numbers, crew.config, crew.renderer)[-1] for rollout in rollouts]
    data = {
        "rewards": [sample.reward for sample in samples],
        "truncated": [sample.status.value == SampleStatus.TRUNCATED for sample in samples],
        "samples": samples,
    }
    return eval_output({"heldout": data}, {f"eval/{name}": value for name, value in rollout_metrics(rollouts).items()})


def _rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


async def generate(
    args: Any, sample: SlimeSample, sampling_params: dict[str, Any], evaluation: bool = False
) -> SampleEntry:
    """One rollout for SLiME's own loop: its sample, or all of them where the agent rewrote its history.

    How it is sampled is the run's business: `sampling_params` say the same.
    """
    crew = await asyncio.to_thread(crew_of, args)
    group, index = sample.group_index or 0, sample.index or 0
    task, attempt = str(sample.metadata.get("task", "")), int(sample.metadata.get("attempt", 0))
    rollout = await _while_wanted(args, crew.attempt(task, group, attempt, evaluation=evaluation))
    if rollout is None:
        sample.status = type(sample.status)(SampleStatus.ABORTED)
        return sample
    numbers = SampleNumbers(first_group=group, first_rollout=index)
    samples = rollout_samples(rollout, task, numbers, crew.config, crew.renderer)
    return samples[-1] if evaluation or len(samples) == 1 else samples


async def _while_wanted(args: Any, rollout: Coroutine[Any, Any, Rollout]) -> Rollout | None:
    """None where SLiME's batch was full first: it waits for what is under way, for which it has no use."""
    working = asyncio.ensure_future(rollout)
    try:
        while not working.done():
            await asyncio.wait({working}, timeout=_WATCH_S)
            if not working.done() and is_batch_full(args):
                return None
        return working.result()
    finally:
        working.cancel()


def even_out(args: Any, groups: list[list[SampleEntry]]) -> None:
    """Make a batch of `generate`'s one that SLiME can unpack, and stop where too much of it was lost."""
    groups[:] = even(groups)
    samples = [sample for group in groups for sample in flat(group)]
    for sample in samples:
        sample.remove_sample = sample.remove_sample or not sample.response_length
    rollouts = {rollout_of(sample, place): sample.remove_sample for place, sample in enumerate(samples)}
    share = run_config(args).rollout.max_lost_share
    if (num_lost := sum(rollouts.values())) > share * len(rollouts):
        hint = "`dockyard doctor` checks this machine; `--rollout.max_lost_share` sets how many may be lost"
        raise DockyardError(f"{num_lost} of {len(rollouts)} rollouts were lost to infrastructure", hint=hint)


def keep_informative(args: Any, samples: list[SampleEntry], **kwargs: Any) -> Any:
    """Prefer groups in which rollouts did not do equally well, as long as there are others to take instead."""
    [group] = scored_groups(flat(samples)).values()
    reward = next(iter(group.rewards.values()), None)
    return filter_output(keep=group.differs, reason=None if group.differs else f"all_{reward}")


def reward_post_process(args: Any, samples: list[SlimeSample]) -> tuple[list[float], list[float]]:
    """Raw rewards and advantages, as `dockyard train` has them.

    A rollout that has none to be compared with trains nothing, not even by the KL penalty.
    """
    groups = scored_groups(samples)
    advantages = {index: group.advantages() for index, group in groups.items()}
    for sample in samples:
        sample.remove_sample = sample.remove_sample or not groups[sample.group_index].comparable
    return (
        [float(sample.reward or 0.0) for sample in samples],
        [advantages[sample.group_index].get(rollout_of(sample, place), 0.0) for place, sample in enumerate(samples)],
    )
