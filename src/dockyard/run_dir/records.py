"""A rollout as one line of JSON, and back without losing a bit.

Numbers are written so that float32 log-probabilities return exactly. What is not a finite number is refused: JSON has
no NaN, and a trainer has no use for one.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from dockyard.errors import DockyardError
from dockyard.run_dir.phases import step_of
from dockyard.types import Failure, Rollout, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """A finished rollout and its place in the run."""

    phase: str
    """`step-00003`, `eval-00003`, `eval-before`, `eval-after`, `rollouts` or `eval`."""
    group: int
    """Which of the phase's groups it belongs to, from 0."""
    rollout: Rollout
    transcript: str = ""
    """What was said, as text, for people to read."""

    @property
    def step(self) -> int | None:
        """The training step, None outside of training."""
        return step_of(self.phase)


def to_line(recorded: RecordedRollout) -> bytes:
    """One line of JSON, without its newline."""
    rollout = recorded.rollout
    try:
        line = _Line(
            phase=recorded.phase,
            step=recorded.step,
            group=recorded.group,
            task=rollout.task,
            kind=rollout.kind,
            attempt=rollout.attempt,
            reward=rollout.reward,
            failure=rollout.failure and replace(rollout.failure, message=_encodable(rollout.failure.message)),
            seconds=rollout.seconds,
            stats=rollout.stats,
            segments=[_SegmentLine.of(segment) for segment in rollout.segments],
            untrusted=[_SegmentLine.of(segment) for segment in rollout.untrusted],
            exchanges=list(rollout.exchanges),
            transcript=_encodable(recorded.transcript),
        )
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        key = ".".join(map(str, details["loc"]))
        raise DockyardError(
            f"a rollout of `{rollout.task}` cannot be recorded: `{key}` is `{details['input']}`; {details['msg']}",
            hint="a NaN comes from the engine or the verifier; the rollouts before this one are kept",
        ) from error
    return line.model_dump_json().encode()


def from_line(data: bytes) -> RecordedRollout:
    """What `to_line` wrote. Raises pydantic's ValidationError on anything else."""
    line = _Line.model_validate_json(data)
    rollout = Rollout(
        task=line.task,
        kind=line.kind,
        attempt=line.attempt,
        segments=tuple(segment.segment() for segment in line.segments),
        untrusted=tuple(segment.segment() for segment in line.untrusted),
        exchanges=tuple(line.exchanges),
        reward=line.reward,
        failure=line.failure,
        seconds=line.seconds,
        stats=line.stats,
    )
    return RecordedRollout(phase=line.phase, group=line.group, rollout=rollout, transcript=line.transcript)


class _SegmentLine(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    token_ids: list[int]
    sampled: list[int]
    logprobs: list[float] | None
    versions: list[int] | None

    @classmethod
    def of(cls, segment: Segment) -> Self:
        return cls(
            token_ids=segment.token_ids.tolist(),
            sampled=segment.sampled.astype(np.int8).tolist(),  # 0 and 1 are a third as long as false and true
            logprobs=None if segment.logprobs is None else segment.logprobs.tolist(),
            versions=None if segment.versions is None else segment.versions.tolist(),
        )

    def segment(self) -> Segment:
        return Segment(
            token_ids=np.array(self.token_ids, np.int32),
            sampled=np.array(self.sampled, np.bool_),
            logprobs=None if self.logprobs is None else np.array(self.logprobs, np.float32),
            versions=None if self.versions is None else np.array(self.versions, np.int32),
        )


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    phase: str
    step: int | None
    group: int
    task: str
    kind: str
    attempt: int
    reward: float | None
    failure: Failure | None
    seconds: dict[str, float]
    stats: dict[str, int]
    segments: list[_SegmentLine]
    untrusted: list[_SegmentLine] = []
    exchanges: list[dict[str, Any]] = []
    transcript: str = ""


def _encodable(text: str) -> str:
    """Program output may hold lone surrogates, which no UTF-8 file can."""
    return text.encode(errors="replace").decode()
