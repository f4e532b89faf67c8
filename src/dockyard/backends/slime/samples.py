"""SLiME's samples: one per segment of a rollout, at least one per rollout, in groups of equal size.

The classes are those of SLiME, or of its fork Miles, whichever is the caller. Neither is on PyPI.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any, Protocol

from dockyard.config import RunConfig
from dockyard.convert.samples import SampleMeta, SampleNumbers, samples_of
from dockyard.convert.slime_pt import slime_rows
from dockyard.gateway.render.renderer import Renderer
from dockyard.types import Group, Rollout


class SlimeSample(Protocol):
    """The attributes of SLiME's `Sample` that the hooks use."""

    group_index: int | None
    index: int | None
    rollout_id: int | None
    tokens: list[int]
    response_length: int
    reward: Any
    status: Any
    remove_sample: bool
    metadata: dict[str, Any]


type SampleEntry = SlimeSample | list[SlimeSample]
"""A rollout in a batch of SLiME: its only sample, or the list of its samples."""


def new_sample(row: Mapping[str, Any]) -> SlimeSample:
    """Create a sample from fields that both programs have."""
    return _module("utils.types").Sample.from_dict(dict(row))


def train_output(samples: Sequence[Sequence[SampleEntry]], metrics: Mapping[str, float]) -> Any:
    """Return the result of a rollout function for training."""
    return _module("rollout.base_types").RolloutFnTrainOutput(samples=samples, metrics=dict(metrics))


def eval_output(data: Mapping[str, Any], metrics: Mapping[str, float]) -> Any:
    """Return the result of a rollout function for an evaluation."""
    return _module("rollout.base_types").RolloutFnEvalOutput(data=data, metrics=dict(metrics))


def filter_output(*, keep: bool, reason: str | None) -> Any:
    """Return the result of a dynamic-sampling filter. A dropped group is kept after all if the batch gets too small.

    Miles lacks this option and would request more groups forever, so it keeps every group.
    """
    output = _module("rollout.filter_hub.base_types").DynamicFilterOutput
    if "keep_when_insufficient" not in {field.name for field in fields(output)}:
        return output(keep=True)
    return output(keep=keep, reason=reason, keep_when_insufficient=True)


def is_batch_full(args: Any) -> bool:
    """Whether SLiME's own loop has all groups of this step and discards further ones."""
    loop: Any = sys.modules.get("slime.rollout.sglang_rollout")
    return loop is not None and loop.GenerateState(args).aborted


def adapter_name(args: Any) -> str | None:
    """Return the LoRA adapter to sample from. Only Miles has one."""
    if "miles" not in sys.modules:
        return None
    lora = _module("utils.lora")
    return lora.LORA_ADAPTER_NAME if lora.lora_rollout_enabled(args) else None


def _module(name: str) -> Any:
    return import_module(f"{'miles' if 'miles' in sys.modules else 'slime'}.{name}")


def step_samples(
    groups: Sequence[Group], step: int, config: RunConfig, renderer: Renderer
) -> list[list[list[SlimeSample]]]:
    """Return samples by group, rollout and segment. If a step has too few groups, add padding groups."""
    size, num_groups = config.grpo.group_size, config.grpo.tasks_per_step
    numbers = SampleNumbers(first_group=step * num_groups, first_rollout=step * num_groups * size)
    padding = [_padding_group(size)] * (num_groups - len(groups))
    return [
        [rollout_samples(rollout, f"group {number}", numbers, config, renderer) for rollout in group.rollouts]
        for number, group in enumerate([*groups, *padding])
    ]


def rollout_samples(
    rollout: Rollout, group: str, numbers: SampleNumbers, config: RunConfig, renderer: Renderer
) -> list[SlimeSample]:
    """Return the samples of one rollout, with one `rollout_id`. A rollout without tokens or reward gets padding."""
    meta = SampleMeta(
        agent=config.agent.name,
        model=config.model.name,
        group=group,
        exact=True,
        skipped="no_reward" if rollout.reward is None else None,
    )
    return [new_sample(row) for row in slime_rows(samples_of(rollout, meta, numbers, renderer, pad=True))]


def _padding_group(size: int) -> Group:
    """Return a group of lost rollouts, which trains nothing."""
    rollouts = [
        Rollout(task="", kind="", attempt=attempt, segments=(), reward=None, failure=None) for attempt in range(size)
    ]
    return Group(task="", rollouts=tuple(rollouts))


def even(groups: Sequence[Sequence[SampleEntry]]) -> list[list[SampleEntry]]:
    """Make either all rollouts lists or none: SLiME looks only at the first to see how deep to unpack."""
    nested = [[entry if isinstance(entry, list) else [entry] for entry in group] for group in groups]
    if all(len(samples) == 1 for group in nested for samples in group):
        return [[samples[0] for samples in group] for group in nested]
    return [[*group] for group in nested]


def flat(entries: Sequence[SampleEntry]) -> list[SlimeSample]:
    """Return the samples of a group, whether its rollouts are lists or not."""
    return [sample for entry in entries for sample in (entry if isinstance(entry, list) else [entry])]
