"""The functions and the data source that SLiME, or its fork Miles, uses by dotted path.

    --rollout-function-path            generate_rollout, or generate_rollout_async for `train_async.py`
    --custom-reward-post-process-path  reward_post_process, always
    --data-source-path                 SlimeDataSource, always

SLiME's own loop, which supports dynamic sampling, calls Dockyard per rollout instead:

    --custom-generate-function-path    generate
    --rollout-sample-filter-path       even_out, always with it
    --dynamic-sampling-filter-path     keep_informative, if wanted
    --eval-function-path               generate_rollout

Advantages are computed here, because SLiME groups samples by position, counts segments as rollouts, and gives lost
rollouts a reward of 0.
"""

import asyncio
import json
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from dockyard.backends.launch import read_task_list
from dockyard.backends.slime.samples import (
    SampleEntry,
    SlimeSample,
    eval_output,
    even,
    filter_output,
    flat,
    is_batch_full,
    new_sample,
    rollout_samples,
    step_samples,
    train_output,
)
from dockyard.backends.slime.worker import RolloutWorker, WorkerKey, check_agreement, run_config, run_folder
from dockyard.collect.run_plan import rollouts_in
from dockyard.convert.samples import SampleNumbers, SampleStatus
from dockyard.errors import DockyardError, UsageError
from dockyard.rl.advantage import std_advantage
from dockyard.rl.statistics import rollout_metrics
from dockyard.run_dir.durable import write_atomically
from dockyard.tasks.order import due
from dockyard.types import Rollout

_WATCH_S = 1.0
_workers: dict[WorkerKey, RolloutWorker] = {}
_opening = threading.Lock()


def worker_of(args: Any) -> RolloutWorker:
    """Return the worker of this process, which the first call opens."""
    key = WorkerKey.of(args)
    with _opening:
        if key not in _workers:
            check_agreement(args, run_config(args))
            _workers[key] = RolloutWorker(key)
        return _workers[key]


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Make a step's groups, or evaluate on the held-out tasks. `rollout_id` determines the tasks."""
    return _evaluate(args, rollout_id) if evaluation else _collect(args, rollout_id, ahead=0)


def generate_rollout_async(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Do the same for `train_async.py`, whose rollouts are always one update old.

    Further steps are started early, as far as `rollout.max_staleness` allows.
    """
    if evaluation:
        return _evaluate(args, rollout_id)
    return _collect(args, rollout_id, ahead=max(worker_of(args).config.rollout.max_staleness - 1, 0))


def _collect(args: Any, step: int, *, ahead: int) -> Any:
    if args.dynamic_sampling_filter_path or args.rollout_sample_filter_path:
        hint = "`--custom-generate-function-path dockyard.backends.slime.hooks.generate` runs in SLiME's own loop"
        raise UsageError("SLiME's filters have no effect beside this `--rollout-function-path`", hint=hint)
    worker = worker_of(args)
    groups = worker.collect(step, ahead=ahead)
    metrics = rollout_metrics(rollouts_in(groups))
    worker.run.record_metrics(step, metrics)
    return train_output(even(step_samples(groups, step, worker.config, worker.renderer)), metrics)


def _evaluate(args: Any, rollout_id: int) -> Any:
    """Count each rollout once, and lost rollouts not at all."""
    worker = worker_of(args)
    rollouts = [rollout for rollout in rollouts_in(worker.evaluate(rollout_id)) if rollout.reward is not None]
    if not rollouts:
        raise DockyardError("every rollout of the evaluation was lost", hint="`dockyard doctor` checks this machine")
    numbers = SampleNumbers()
    samples = [
        rollout_samples(rollout, rollout.task, numbers, worker.config, worker.renderer)[-1] for rollout in rollouts
    ]
    data = {
        "rewards": [sample.reward for sample in samples],
        "truncated": [sample.status.value == SampleStatus.TRUNCATED for sample in samples],
        "samples": samples,
    }
    return eval_output({"heldout": data}, {f"eval/{name}": value for name, value in rollout_metrics(rollouts).items()})


async def generate(
    args: Any, sample: SlimeSample, sampling_params: dict[str, Any], evaluation: bool = False
) -> SampleEntry:
    """Make one rollout for SLiME's own loop. Several samples are returned if the agent rewrote its history.

    `sampling_params` is not used: the run's settings have the same values.
    """
    worker = await asyncio.to_thread(worker_of, args)
    group, index = sample.group_index or 0, sample.index or 0
    task, attempt = str(sample.metadata.get("task", "")), int(sample.metadata.get("attempt", 0))
    rollout = await _while_needed(args, worker.attempt(task, group, attempt, evaluation=evaluation))
    if rollout is None:
        sample.status = type(sample.status)(SampleStatus.ABORTED)
        return sample
    numbers = SampleNumbers(first_group=group, first_rollout=index)
    samples = rollout_samples(rollout, task, numbers, worker.config, worker.renderer)
    return samples[-1] if evaluation or len(samples) == 1 else samples


async def _while_needed(args: Any, rollout: Coroutine[Any, Any, Rollout]) -> Rollout | None:
    """Return None if SLiME's batch is full first: it would wait for running rollouts and then discard them."""
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
    """Bring a batch made by `generate` into a form that SLiME can unpack. Raise if too many rollouts were lost."""
    groups[:] = even(groups)
    samples = [sample for group in groups for sample in flat(group)]
    for sample in samples:
        sample.remove_sample = sample.remove_sample or not sample.response_length
    rollouts = {rollout_of(sample, place): sample.remove_sample for place, sample in enumerate(samples)}
    share = run_config(args).rollout.max_lost_share
    if (num_lost := sum(rollouts.values())) > share * len(rollouts):
        hint = "`dockyard doctor` checks this machine; `--rollout.max_lost_share` sets the share that may be lost"
        raise DockyardError(f"{num_lost} of {len(rollouts)} rollouts were lost to infrastructure", hint=hint)


def keep_informative(args: Any, samples: list[SampleEntry], **kwargs: Any) -> Any:
    """Keep groups with different rewards; drop others as long as there are groups to replace them."""
    [rewards] = scored_groups(flat(samples)).values()
    if len(set(rewards.values())) > 1:
        return filter_output(keep=True, reason=None)
    return filter_output(keep=False, reason=f"all_{next(iter(rewards.values()), None)}")


def reward_post_process(args: Any, samples: list[SlimeSample]) -> tuple[list[float], list[float]]:
    """Return raw rewards and advantages, computed as in `dockyard train`.

    A rollout without others to compare it with trains nothing, not even through the KL penalty.
    """
    groups = scored_groups(samples)
    advantages = {
        index: dict(zip(rewards, std_advantage([*rewards.values()], ()), strict=True))
        for index, rewards in groups.items()
    }
    for sample in samples:
        sample.remove_sample = sample.remove_sample or len(groups[sample.group_index]) < 2
    return (
        [float(sample.reward or 0.0) for sample in samples],
        [advantages[sample.group_index].get(rollout_of(sample, place), 0.0) for place, sample in enumerate(samples)],
    )


def scored_groups(samples: Sequence[SlimeSample]) -> dict[int | None, dict[int, float]]:
    """Return the rewards by group and rollout id. Samples marked for removal belong to lost rollouts."""
    groups: dict[int | None, dict[int, float]] = {}
    for place, sample in enumerate(samples):
        rewards = groups.setdefault(sample.group_index, {})
        if sample.remove_sample or sample.reward is None:
            continue
        reward, rollout = float(sample.reward), rollout_of(sample, place)
        if rewards.setdefault(rollout, reward) != reward:
            raise DockyardError(
                f"the samples of rollout {rollout} have the rewards {rewards[rollout]} and {reward}",
                hint="all samples of a rollout carry its reward; does one of your hooks change them?",
            )
    return groups


def rollout_of(sample: SlimeSample, place: int) -> int:
    """Return the rollout of a sample. A sample without one is its own rollout, with a unique negative number."""
    return -1 - place if sample.rollout_id is None else sample.rollout_id


class SlimeDataSource:
    """The class for `--data-source-path`: the run's training tasks in order, repeated without end.

    The number of a group determines its task, and the position survives a resume.
    """

    def __init__(self, args: Any) -> None:
        self._args = args
        self._config = run_config(args)
        self._tasks = read_task_list(run_folder(args)).train
        self._next = 0
        self._returned: list[int] = []
        """Groups that SLiME returned unused. They are used first."""
        self._step_start = self._position()
        """The position at the start of the last step."""

    def get_samples(self, num_samples: int) -> list[list[SlimeSample]]:
        """Return this number of groups of pending samples. SLiME's loop calls it once per step."""
        self._step_start = self._position()
        again, self._returned = self._returned[:num_samples], self._returned[num_samples:]
        first, self._next = self._next, self._next + num_samples - len(again)
        return [self._group(number) for number in (*again, *range(first, self._next))]

    def add_samples(self, samples: Sequence[Sequence[SampleEntry]]) -> None:
        """Take back unused groups. `get_samples` returns them again, without what was made of them."""
        self._returned += [group[0].group_index or 0 for group in map(flat, samples)]

    def save(self, rollout_id: int) -> None:
        """Save the position for a run resumed after this step. `train_async.py` has already started the next step."""
        has_started_next = self._config.rollout.max_staleness > 0 and rollout_id + 1 < self._args.num_rollout
        file = _position_file(self._args.save, rollout_id)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(self._step_start if has_started_next else self._position()).encode())

    def load(self, rollout_id: int | None = None) -> None:
        """Restore the position after this step. Does nothing before the first."""
        if rollout_id is None or rollout_id < 0:
            return
        file = _position_file(self._args.load, rollout_id)
        try:
            place = json.loads(file.read_bytes())
        except FileNotFoundError:
            hint = "resume from a checkpoint of `dockyard backend slime`; without this file the tasks would start over"
            raise DockyardError(f"`{file}` does not exist", hint=hint) from None
        self._next, self._returned = place["next"], place["returned"]

    def __len__(self) -> int:
        return len(self._tasks)

    def _position(self) -> dict[str, Any]:
        return {"next": self._next, "returned": [*self._returned]}

    def _group(self, number: int) -> list[SlimeSample]:
        size = self._config.grpo.group_size
        [task] = due(self._tasks, number, 1, self._config.seed, kind_of=lambda task: task.kind)
        rows = (
            {
                "group_index": number,
                "index": number * size + attempt,
                "prompt": task.name,
                "label": task.name,
                "status": "pending",
                "metadata": {"task": task.name, "attempt": attempt},
            }
            for attempt in range(size)
        )
        return [new_sample(row) for row in rows]


def _position_file(folder: str, rollout_id: int) -> Path:
    return Path(folder, "rollout", f"dockyard_tasks_{rollout_id}.json")
