"""The classes of SLiME, or of its fork Miles, whichever is the caller. Neither is on PyPI."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any, Protocol


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
