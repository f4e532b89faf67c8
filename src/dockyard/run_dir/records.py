"""Writes a rollout as one line of JSON and reads it back without loss.

Numbers are written so that float32 log-probabilities are read back exactly. NaN and infinity are refused: JSON has
neither, and a trainer cannot use them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, ValidationError

from dockyard.chat_format import exchange_json, parse_exchange, replace_surrogates
from dockyard.errors import DockyardError
from dockyard.run_dir.paths import step_of
from dockyard.types import Exchange, Failure, Rollout, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """A finished rollout and its place in the run."""

    phase: str
    """`step-00003`, `eval-00003`, `eval-before`, `eval-after`, `rollouts` or `eval`."""
    group: int
    """The index of its group in the phase, from 0."""
    rollout: Rollout
    transcript: str = ""
    """The conversation as text, for people to read."""

    @property
    def step(self) -> int | None:
        """The training step; None outside training."""
        return step_of(self.phase)


def to_line(recorded: RecordedRollout) -> bytes:
    """Return one line of JSON, without a newline."""
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
            shaped_reward=rollout.shaped_reward,
            failure=rollout.failure and replace(rollout.failure, message=replace_surrogates(rollout.failure.message)),
            seconds=rollout.seconds,
            stats=rollout.stats,
            segments=[_SegmentLine.of(segment) for segment in rollout.segments],
            untrusted=[_SegmentLine.of(segment) for segment in rollout.untrusted],
            exchanges=list(rollout.exchanges),
            transcript=replace_surrogates(recorded.transcript),
        )
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        key = ".".join(map(str, details["loc"]))
        raise DockyardError(
            f"a rollout of `{rollout.task}` cannot be recorded: `{key}` is `{details['input']}`; {details['msg']}",
            hint="a NaN comes from the engine or the verifier; earlier rollouts are kept",
        ) from error
    # Left out if there is none, so that older versions can read the records of a run without shaping.
    return line.model_dump_json(exclude={"shaped_reward"} if line.shaped_reward is None else None).encode()


def from_line(data: bytes) -> RecordedRollout:
    """Parse what `to_line` wrote. Raises pydantic's ValidationError for anything else."""
    line = _Line.model_validate_json(data)
    rollout = Rollout(
        task=line.task,
        kind=line.kind,
        attempt=line.attempt,
        segments=tuple(segment.segment() for segment in line.segments),
        untrusted=tuple(segment.segment() for segment in line.untrusted),
        exchanges=tuple(line.exchanges),
        reward=line.reward,
        shaped_reward=line.shaped_reward,
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


def _exchange(value: object) -> Exchange:
    if isinstance(value, Exchange):
        return value
    if not isinstance(value, Mapping):
        raise ValueError("not a recorded model call: not a JSON object")
    return parse_exchange(cast("Mapping[str, Any]", value))


type _ExchangeLine = Annotated[Exchange, PlainValidator(_exchange), PlainSerializer(exchange_json)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    phase: str
    step: int | None
    group: int
    task: str
    kind: str
    attempt: int
    reward: float | None
    shaped_reward: float | None = None
    """Absent in the records of runs without `grpo.reward`."""
    failure: Failure | None
    seconds: dict[str, float]
    stats: dict[str, int]
    segments: list[_SegmentLine]
    untrusted: list[_SegmentLine] = []
    exchanges: list[_ExchangeLine] = []
    transcript: str = ""
