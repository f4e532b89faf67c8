"""Training samples with SLiME's field names, one per segment: from rollouts, to and from rows of a file, and back."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dockyard.convert.conversation import Converted
from dockyard.errors import DockyardError
from dockyard.gateway.protocol import first_problem
from dockyard.gateway.render.renderer import Renderer
from dockyard.types import Blame, BoolArray, Failure, FloatArray, Group, IntArray, Rollout, Segment


class SampleStatus(StrEnum):
    """How the rollout ended."""

    PENDING = "pending"
    """Appears only in SLiME's own files."""
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """A limit of time, turns or context ended it."""
    ABORTED = "aborted"
    """The infrastructure caused the failure: there is no reward."""
    FAILED = "failed"
    """The policy caused another failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One segment of a rollout. All segments of a rollout have its `rollout_id` and its whole reward."""

    group_index: int
    """The same for all rollouts of a task."""
    index: int
    """Unique within a file."""
    rollout_id: int
    prompt: str
    """For people to read, like `response`. It is never tokenised."""
    tokens: IntArray
    """Prompt and response."""
    response: str
    response_length: int
    """The number of `tokens` after the first prompt, tool results included."""
    label: str
    """The name of the task."""
    reward: float | None
    """None if the rollout is dropped from its group."""
    loss_mask: BoolArray
    """Over the response: True where the policy drew the token."""
    rollout_log_probs: FloatArray | None
    """Over the response, 0 where not sampled. None if they were not recorded."""
    versions: IntArray | None = None
    """Over the response: the weight version that drew the token, -1 where not sampled. None if not recorded."""
    status: str
    remove_sample: bool
    """True if it must not be trained on."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])

    def row(self) -> dict[str, Any]:
        """The fields as plain lists and numbers."""
        row: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        row["loss_mask"] = self.loss_mask.astype(np.int8)
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}

    @classmethod
    def of_row(cls, row: Mapping[str, Any], where: str) -> Self:
        """Parse the output of `row`, or of SLiME's `Sample.to_dict`. Errors name the place and the field."""
        try:
            wire = _Row.model_validate(row)
        except ValidationError as error:
            raise _broken(where, first_problem(error)) from error
        wire.check(where)
        response, logprobs, versions = wire.response_length, wire.rollout_log_probs, wire.versions
        return cls(
            group_index=wire.group_index,
            index=wire.index,
            rollout_id=wire.index if wire.rollout_id is None else wire.rollout_id,
            prompt=wire.prompt if isinstance(wire.prompt, str) else "",
            tokens=np.array(wire.tokens, np.int32),
            response=wire.response,
            response_length=response,
            label=wire.label or "",
            # SLiME stores a number where there is no reward, and excludes the sample from the loss instead.
            reward=None if wire.remove_sample else wire.reward,
            loss_mask=np.ones(response, np.bool_) if wire.loss_mask is None else np.array(wire.loss_mask, np.bool_),
            rollout_log_probs=None if logprobs is None else np.array(logprobs, np.float32),
            versions=None if versions is None else np.array(versions, np.int32),
            status=wire.status.value,
            remove_sample=wire.remove_sample,
            metadata=wire.metadata,
        )


type _Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class _Row(BaseModel):
    """A sample as stored in a file. Unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    group_index: int
    index: int
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[_Int32]
    response: str = ""
    response_length: int = Field(ge=0)
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    versions: list[_Int32] | None = None
    status: SampleStatus
    remove_sample: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict)

    def check(self, where: str) -> None:
        """Refuse lists whose lengths do not agree."""
        if self.response_length > len(self.tokens):
            raise _broken(where, f"`response_length` is {self.response_length}, with {len(self.tokens)} `tokens`")
        first = (self.loss_mask or [1])[0] if self.response_length else 0
        if first and self.response_length == len(self.tokens):
            raise _broken(where, "its first token is marked as sampled, but there is no prompt before it")
        for name in ("loss_mask", "rollout_log_probs", "versions"):
            values: list[float] | None = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                raise _broken(where, f"`{name}` has {len(values)} values, `response_length` is {self.response_length}")


def _broken(where: str, problem: str) -> DockyardError:
    return DockyardError(f"{where} is not a sample: {problem}", hint="write it again with `dockyard convert`")


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
    """SLiME's idiom for a rollout that gave nothing to train on: one token in the response, not in the loss."""
    ids, sampled = np.zeros(2, np.int32), np.array([False, True])
    segment = Segment(token_ids=ids, sampled=sampled, logprobs=None, versions=None)
    return replace(_sample(segment, place, rollout, meta, None), loss_mask=np.zeros(1, np.bool_))


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
    made = [
        tuple(_rollout(siblings, attempt) for attempt, siblings in enumerate(group.values()))
        for group in groups.values()
    ]
    return tuple(Group(task=rollouts[0].task, rollouts=rollouts) for rollouts in made)


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
