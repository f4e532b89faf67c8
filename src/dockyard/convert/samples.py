"""Converts rollouts to samples, and samples back to groups of rollouts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dockyard.convert.conversation import Converted
from dockyard.convert.sample import Sample, SampleStatus
from dockyard.convert.sample_files import open_writer, read_samples
from dockyard.errors import DockyardError
from dockyard.gateway.render.renderer import Renderer
from dockyard.types import Blame, Failure, Group, Rollout, Segment

__all__ = [
    "Sample",
    "SampleMeta",
    "SampleNumbers",
    "SampleStatus",
    "converted_samples",
    "groups_of",
    "open_writer",
    "read_samples",
    "samples_of",
]

_LOST = ("no_reward", "unreadable")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The indices of a sample in its file."""

    group_index: int
    rollout_id: int
    index: int
    segment: int


class SampleNumbers:
    """Numbers groups, rollouts and samples in the order in which they are read."""

    def __init__(self, *, first_group: int = 0, first_rollout: int = 0) -> None:
        self._first_group = first_group
        self._groups: dict[str, int] = {}
        self._num_rollouts = self._num_samples = first_rollout

    def take(self, group_name: str, num_samples: int) -> list[_Place]:
        """The indices for the samples of one rollout, in the group of this name."""
        group = self._groups.setdefault(group_name, self._first_group + len(self._groups))
        first, rollout = self._num_samples, self._num_rollouts
        self._num_samples += num_samples
        self._num_rollouts += 1
        return [
            _Place(group_index=group, rollout_id=rollout, index=first + segment, segment=segment)
            for segment in range(num_samples)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMeta:
    """What samples record about their rollout beyond the rollout itself."""

    agent: str
    model: str
    group: str = ""
    """The group in which rewards are compared. Empty: the rollouts of the same task."""
    trial: str = ""
    exact: bool = False
    """Whether the token ids are those that were sampled."""
    skipped: str | None = None
    """Why the rollout is not training data, in one word."""


def converted_samples(converted: Converted, numbers: SampleNumbers, renderer: Renderer | None) -> list[Sample]:
    """Return the samples of a converted trial."""
    meta = SampleMeta(
        agent=converted.agent,
        model=converted.model,
        group=converted.group,
        trial=converted.trial,
        exact=converted.exact,
        skipped=converted.skipped,
    )
    return samples_of(converted.rollout, meta, numbers, renderer)


def samples_of(
    rollout: Rollout, meta: SampleMeta, numbers: SampleNumbers, renderer: Renderer | None, *, pad: bool = False
) -> list[Sample]:
    """Return one sample per segment. A lost rollout gets one that trains nothing, so that its group keeps its size.

    A rollout that has a reward but no tokens, or is not finished, has no samples; `pad` gives it one that trains
    nothing as well.
    """
    trained = [segment for segment in rollout.segments if segment.sampled.any()]
    group = meta.group or rollout.task
    if meta.skipped is None and trained:
        places = numbers.take(group, len(trained))
        return [_sample(*pair, rollout, meta, renderer) for pair in zip(trained, places, strict=True)]
    if pad or (rollout.reward is None and rollout.task and meta.skipped in _LOST):
        [place] = numbers.take(group, 1)
        return [_padding(place, rollout, meta)]
    return []


def _sample(segment: Segment, place: _Place, rollout: Rollout, meta: SampleMeta, renderer: Renderer | None) -> Sample:
    start = int(np.argmax(segment.sampled))
    return Sample(
        group_index=place.group_index,
        index=place.index,
        rollout_id=place.rollout_id,
        prompt=renderer.text(segment.token_ids[:start]) if renderer else "",
        tokens=segment.token_ids,
        response=renderer.text(segment.token_ids[start:]) if renderer else "",
        response_length=len(segment.token_ids) - start,
        label=rollout.task,
        reward=rollout.reward,
        loss_mask=segment.sampled[start:],
        rollout_log_probs=None if segment.logprobs is None else segment.logprobs[start:],
        versions=None if segment.versions is None else segment.versions[start:],
        status=_status(rollout),
        remove_sample=rollout.reward is None,
        metadata=_metadata(rollout, meta, place.segment),
    )


def _padding(place: _Place, rollout: Rollout, meta: SampleMeta) -> Sample:
    """SLiME's idiom for a rollout that gave nothing to train on."""
    return Sample(
        group_index=place.group_index,
        index=place.index,
        rollout_id=place.rollout_id,
        prompt="",
        tokens=np.zeros(2, np.int32),
        response="",
        response_length=1,
        label=rollout.task,
        reward=rollout.reward,
        loss_mask=np.zeros(1, np.bool_),
        rollout_log_probs=None,
        status=_status(rollout),
        remove_sample=rollout.reward is None,
        metadata=_metadata(rollout, meta, 0),
    )


def _metadata(rollout: Rollout, meta: SampleMeta, segment: int) -> dict[str, Any]:
    failure = rollout.failure
    return {
        "task": rollout.task,
        "kind": rollout.kind,
        "attempt": rollout.attempt,
        "trial": meta.trial,
        "agent": meta.agent,
        "model": meta.model,
        "segment": segment,
        "exact": meta.exact,
        "failure": failure and {"cause": failure.cause, "blame": failure.blame.value, "message": failure.message},
        "skipped": meta.skipped,
    }


def _status(rollout: Rollout) -> str:
    if rollout.reward is None:
        return SampleStatus.ABORTED.value
    if rollout.cut_short:
        return SampleStatus.TRUNCATED.value
    return (SampleStatus.FAILED if rollout.failure else SampleStatus.COMPLETED).value


def groups_of(samples: Iterable[Sample]) -> tuple[Group, ...]:
    """Rollouts with their segments, in groups. A dropped rollout has no reward, and stays in its group."""
    groups: dict[int, dict[int, list[Sample]]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, {}).setdefault(sample.rollout_id, []).append(sample)
    return tuple(_group(group) for group in groups.values())


def _group(rollouts: dict[int, list[Sample]]) -> Group:
    made = tuple(_rollout(siblings, attempt) for attempt, siblings in enumerate(rollouts.values()))
    return Group(task=made[0].task, rollouts=made)


def _rollout(siblings: list[Sample], attempt: int) -> Rollout:
    """`attempt` is the index in the group, for SLiME's files, which do not store it."""
    first = siblings[0]
    rewards = {sample.reward for sample in siblings}
    if len(rewards) > 1:
        raise DockyardError(
            f"rollout {first.rollout_id} of `{first.label}` has the rewards {sorted(map(str, rewards))}",
            hint="all samples of a rollout must have the same reward; the file may mix several jobs",
        )
    metadata = first.metadata
    return Rollout(
        task=str(metadata.get("task") or first.label),
        kind=str(metadata.get("kind") or ""),
        attempt=int(metadata.get("attempt", attempt)),
        segments=tuple(_segment(sample) for sample in siblings if sample.loss_mask.any()),
        reward=first.reward,
        failure=_failure(metadata.get("failure")),
        stats={"cut_at_end": 1} if any(sample.status == SampleStatus.TRUNCATED for sample in siblings) else {},
    )


def _failure(recorded: dict[str, str] | None) -> Failure | None:
    if not recorded:
        return None
    return Failure(cause=recorded["cause"], blame=Blame(recorded["blame"]), message=recorded["message"])


def _segment(sample: Sample) -> Segment:
    before = len(sample.tokens) - sample.response_length
    logprobs, versions = sample.rollout_log_probs, sample.versions
    return Segment(
        token_ids=sample.tokens,
        sampled=np.concatenate([np.zeros(before, np.bool_), sample.loss_mask]),
        logprobs=None if logprobs is None else np.concatenate([np.zeros(before, np.float32), logprobs]),
        versions=None if versions is None else np.concatenate([np.full(before, -1, np.int32), versions]),
    )
