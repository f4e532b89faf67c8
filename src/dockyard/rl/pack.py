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
    """One segment with what its sampled tokens are worth."""

    token_ids: IntArray
    targets: IntArray
    """Positions of the sampled tokens, each at least 1."""
    old_logprobs: FloatArray | None
    """Of the tokens at `targets`, under the weights that drew them; None when nobody recorded them."""
    advantage: float
    weight: float
    """Of each target in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One forward pass. The arrays after `ends` have one entry per trained token."""

    start: int = 0
    """How many tokens come before it, which were run by themselves (`rl/trees.py`)."""
    token_ids: IntArray
    positions: IntArray
    ends: IntArray
    """One past the last token that begins with this one's prefix."""
    sources: IntArray
    """Index of the token that predicts the target, counted with those before the row."""
    targets: IntArray
    """Token ids."""
    old_logprobs: FloatArray
    """NaN where nobody recorded them."""
    advantages: FloatArray
    weights: FloatArray
    segments: IntArray
    """Which of the row's examples the token belongs to. An example is never divided between rows."""


def pack(examples: Sequence[Example], max_tokens: int) -> list[PackedRow]:
    """Rows of at most `max_tokens` tokens. Sequences that begin alike stay together.

    A longer sequence has a row of its own, which takes in others that add little to it: agents' first prompts alone may
    be longer than a row, and are the same in every rollout.
    """
    ordered = in_order(examples)
    return lay_out(ordered, divide(*sizes(ordered), max_tokens))


def in_order(examples: Sequence[Example]) -> list[Example]:
    """Those that begin alike beside each other."""
    return sorted(examples, key=lambda example: example.token_ids.astype(">i4").tobytes())


def sizes(ordered: Sequence[Example]) -> tuple[list[int], list[int]]:
    """How long each is, and how much of it the one before begins with too."""
    lengths = [len(example.token_ids) for example in ordered]
    shared = [common_prefix(one.token_ids, other.token_ids) for one, other in pairwise(ordered)]
    return lengths, [0, *shared][: len(lengths)]


def divide(lengths: Sequence[int], shared: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Which of them make a row: from the first one's index to one past the last one's."""
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
    """These rows, without the first `start` tokens, which are the same in all of them."""
    return [_row(ordered[first:last], start) for first, last in bounds]


def _row(examples: Sequence[Example], start: int) -> PackedRow:
    """Lay sorted sequences out as a trie: each adds only what follows its common beginning with the one before."""
    tokens, positions, ends = np.zeros((3, sum(len(example.token_ids) for example in examples)), dtype=np.int32)
    path = np.arange(start, dtype=np.int32)  # where each token of the present sequence stands in the row
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
    """What to train on. All segments of a rollout share its advantage, and all its tokens weigh the same.

    Rollouts without advantage move nothing but the KL penalty, so they count and are left out unless `with_idle`.
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
    """The rollouts whose loss is taken, and which the mean is over. The others were still compared with."""
    items = scored(group, config)
    if (config.zero_variance == "exclude" or config.dynamic_sampling) and not any(item.advantage for item in items):
        return []
    if config.overlong == "mask":
        items = [item for item in items if not item.rollout.cut_short]
    return items


def _example(segment: Segment, advantage: float, weight: float) -> Example:
    targets = np.flatnonzero(segment.sampled).astype(np.int32)
    assert targets[0] > 0  # nothing comes before the first token that could have drawn it
    return Example(
        token_ids=segment.token_ids,
        targets=targets,
        old_logprobs=None if segment.logprobs is None else segment.logprobs[targets],
        advantage=advantage,
        weight=weight,
    )
