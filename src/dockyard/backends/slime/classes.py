"""SLiME's own classes, or those of Miles, its fork: whichever of the two has called. Neither is on PyPI."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any, Protocol


class SlimeSample(Protocol):
    """What the hooks read and set of SLiME's `Sample`."""

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
"""A rollout in a batch of SLiME's: its one sample, or the list of them."""


def new_sample(row: Mapping[str, Any]) -> SlimeSample:
    """From the fields that both have."""
    return _module("utils.types").Sample.from_dict(dict(row))


def train_output(samples: Sequence[Sequence[SampleEntry]], metrics: Mapping[str, float]) -> Any:
    """What a rollout function returns for training."""
    return _module("rollout.base_types").RolloutFnTrainOutput(samples=samples, metrics=dict(metrics))


def eval_output(data: Mapping[str, Any], metrics: Mapping[str, float]) -> Any:
    """What a rollout function returns for an evaluation."""
    return _module("rollout.base_types").RolloutFnEvalOutput(data=data, metrics=dict(metrics))


def filter_output(*, keep: bool, reason: str | None) -> Any:
    """What a dynamic-sampling filter returns: a group that need not be kept is, where the batch would get too small.

    Miles cannot be told so, and would ask for more groups for ever: there, every group is kept.
    """
    output = _module("rollout.filter_hub.base_types").DynamicFilterOutput
    if "keep_when_insufficient" not in {field.name for field in fields(output)}:
        return output(keep=True)
    return output(keep=keep, reason=reason, keep_when_insufficient=True)


def is_batch_full(args: Any) -> bool:
    """Whether SLiME's own loop has all groups of this step, and drops the others."""
    loop: Any = sys.modules.get("slime.rollout.sglang_rollout")
    return loop is not None and loop.GenerateState(args).aborted


def adapter_name(args: Any) -> str | None:
    """The LoRA adapter to sample from, which only Miles has."""
    if "miles" not in sys.modules:
        return None
    lora = _module("utils.lora")
    return lora.LORA_ADAPTER_NAME if lora.lora_rollout_enabled(args) else None


def _module(name: str) -> Any:
    return import_module(f"{'miles' if 'miles' in sys.modules else 'slime'}.{name}")
