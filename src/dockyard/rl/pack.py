"""Turn groups of rollouts into weighted sequences, and pack them into rows without padding or repeated prefixes.

A row is the trie of its sequences in depth-first order. Token j is an ancestor of token i, and so visible to it,
exactly when `j <= i < ends[j]`. Logprobs and gradients equal those of the sequences one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dockyard.config import GRPOConfig
from dockyard.rl.advantage import Scored, scored
from dockyard.types import FloatArray, Group, IntArray, Segment, common_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One segment with the advantage and weight of its sampled tokens."""

    token_ids: IntArray
    targets: IntArray
    """Positions of the sampled tokens, each at least 1."""
    old_logprobs: FloatArray | None
    """Of the tokens at `targets`, under the weights that sampled them; None if they were not recorded."""
    advantage: float
    weight: float
    """Of each target in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One forward pass. The arrays after `ends` have one entry per trained token."""

    start: int = 0
    """The length of the prefix before the row, which is computed in a pass of its own (`rl/trees.py`)."""
    token_ids: IntArray
    positions: IntArray
    ends: IntArray
    """One past the last token that continues this one."""
    sources: IntArray
    """Index of the token that predicts the target, counted from the start of the prefix."""
    targets: IntArray
    """Token ids."""
    old_logprobs: FloatArray
    """NaN if they were not recorded."""
    advantages: FloatArray
    weights: FloatArray
    segments: IntArray
    """Which of the row's examples the token belongs to. An example is never divided between rows."""


def pack(examples: Sequence[Example], max_tokens: int) -> list[PackedRow]:
    """Pack examples into rows of at most `max_tokens` tokens. Sequences that begin alike stay together.

    A longer sequence gets a row of its own, to which others are added that add few tokens: the first prompt of an agent
    may be longer than a row by itself, and is the same in every rollout.
    """
    ordered = in_order(examples)
    return lay_out(ordered, divide(*sizes(ordered), max_tokens))


def in_order(examples: Sequence[Example]) -> list[Example]:
    """Sort examples so that those that begin alike are neighbours."""
    return sorted(examples, key=lambda example: example.token_ids.astype(">i4").tobytes())


def sizes(ordered: Sequence[Example]) -> tuple[list[int], list[int]]:
    """The length of each example, and the number of tokens it begins with in common with the one before."""
    lengths = [len(example.token_ids) for example in ordered]
    shared = [common_prefix(one.token_ids, other.token_ids) for one, other in pairwise(ordered)]
    return lengths, [0, *shared][: len(lengths)]


def divide(lengths: Sequence[int], shared: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Divide examples into rows: the index of the first of each row, and one past the last."""
    starts: list[int] = []
    size = room = 0
    for index, length in enumerate(lengths):
        new = length - shared[index]
        if not starts or size + new > room:
            starts.append(index)
            size, new = 0, length
            room = max_tokens if length <= max_tokens else length + max_tokens // 4
        size += new
    return list(pairwise([*starts, len(lengths)]))


def lay_out(ordered: Sequence[Example], bounds: Sequence[tuple[int, int]], start: int = 0) -> list[PackedRow]:
    """Lay out these rows without their first `start` tokens, which all of them share."""
    return [_row(ordered[first:last], start) for first, last in bounds]


def _row(examples: Sequence[Example], start: int) -> PackedRow:
    """Lay out sorted sequences as a trie: each adds only what follows its common prefix with the one before."""
    tokens, positions, ends = np.zeros((3, sum(len(example.token_ids) for example in examples)), dtype=np.int32)
    path = np.arange(start, dtype=np.int32)  # the index in the row of each token of the current sequence
    paths: list[IntArray] = []
    size = start
    for index, example in enumerate(examples):
        shared = common_prefix(examples[index - 1].token_ids, example.token_ids) if index else start
        ends[path[shared:]] = size
        new = len(example.token_ids) - shared
        tokens[size : size + new] = example.token_ids[shared:]
        positions[size : size + new] = np.arange(shared, len(example.token_ids))
        path = np.concatenate([path[:shared], np.arange(size, size + new, dtype=np.int32)])
        paths.append(path)
        size += new
    ends[path] = size
    return PackedRow(
        start=start,
        token_ids=tokens[start:size],
        positions=positions[start:size],
        ends=ends[start:size] - start,
        sources=np.concatenate([path[example.targets - 1] for path, example in zip(paths, examples, strict=True)]),
        targets=np.concatenate([example.token_ids[example.targets] for example in examples]),
        old_logprobs=np.concatenate([_old_logprobs(example) for example in examples]),
        advantages=_per_target(examples, [example.advantage for example in examples]),
        weights=_per_target(examples, [example.weight for example in examples]),
        segments=np.repeat(np.arange(len(examples), dtype=np.int32), [len(example.targets) for example in examples]),
    )


def _old_logprobs(example: Example) -> FloatArray:
    if example.old_logprobs is None:
        return np.full(len(example.targets), np.nan, dtype=np.float32)
    return example.old_logprobs.astype(np.float32)


def _per_target(examples: Sequence[Example], values: list[float]) -> FloatArray:
    return np.repeat(np.array(values, dtype=np.float32), [len(example.targets) for example in examples])


_DEFAULT = GRPOConfig()


def examples_of(groups: Sequence[Group], config: GRPOConfig = _DEFAULT, *, with_idle: bool) -> list[Example]:
    """The examples to train on. All segments of a rollout share its advantage, and all its tokens have the same weight.

    A rollout with advantage 0 affects only the KL penalty. It counts in the mean, and is left out unless `with_idle`.
    """
    counted = [item for group in groups for item in _counted(group, config)]
    num_tokens = sum(item.rollout.num_sampled for item in counted)
    examples: list[Example] = []
    for item in counted:
        rollout, advantage = item.rollout, item.advantage
        if rollout.num_sampled == 0 or (advantage == 0 and not with_idle):
            continue
        lengths = {"rollout": rollout.num_sampled, "constant": config.constant_length}
        divisor = num_tokens if config.aggregation == "token" else lengths[config.aggregation] * len(counted)
        weight = 1.0 / divisor
        examples += [_example(segment, advantage, weight) for segment in rollout.segments if segment.sampled.any()]
    return examples


def _counted(group: Group, config: GRPOConfig) -> list[Scored]:
    """The rollouts that the loss is averaged over. The others still count in the group's baseline."""
    items = scored(group, config)
    if (config.zero_variance == "exclude" or config.dynamic_sampling) and not any(item.advantage for item in items):
        return []
    if config.overlong == "mask":
        items = [item for item in items if not item.rollout.cut_short]
    return items


def _example(segment: Segment, advantage: float, weight: float) -> Example:
    targets = np.flatnonzero(segment.sampled).astype(np.int32)
    assert targets[0] > 0  # no token precedes the first that could have predicted it
    return Example(
        token_ids=segment.token_ids,
        targets=targets,
        old_logprobs=None if segment.logprobs is None else segment.logprobs[targets],
        advantage=advantage,
        weight=weight,
    )
