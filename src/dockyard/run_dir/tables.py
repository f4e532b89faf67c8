"""The records of a run as pyarrow tables."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from dockyard.run_dir.records import RecordedRollout
from dockyard.types import Segment

# pyarrow has no types of its own.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

type Table = pa.Table


def metrics_table(lines: Sequence[dict[str, float | None]]) -> Table:
    """Return one row per step. The column `step` is an integer, all others are floats."""
    names = [name for name in dict.fromkeys(name for line in lines for name in line) if name != "step"]
    columns = {name: pa.array([line.get(name) for line in lines], pa.float64()) for name in names}
    return pa.table({"step": pa.array([line["step"] for line in lines], pa.int64()), **columns})


def rollouts_table(recorded: Sequence[RecordedRollout], *, tokens: bool) -> Table:
    """Return one row per rollout. `tokens` adds the column `segments`."""
    rollouts = [item.rollout for item in recorded]
    failures = [rollout.failure for rollout in rollouts]
    columns: dict[str, Any] = {
        "phase": pa.array([item.phase for item in recorded], pa.string()),
        "step": pa.array([item.step for item in recorded], pa.int64()),
        "group": pa.array([item.group for item in recorded], pa.int64()),
        "task": pa.array([rollout.task for rollout in rollouts], pa.string()),
        "kind": pa.array([rollout.kind for rollout in rollouts], pa.string()),
        "attempt": pa.array([rollout.attempt for rollout in rollouts], pa.int64()),
        "reward": pa.array([rollout.reward for rollout in rollouts], pa.float64()),
        "failure": pa.array([failure and failure.cause for failure in failures], pa.string()),
        "failure_message": pa.array([failure and failure.message for failure in failures], pa.string()),
        "num_segments": pa.array([len(rollout.segments) for rollout in rollouts], pa.int64()),
        "num_sampled": pa.array([rollout.num_sampled for rollout in rollouts], pa.int64()),
        "transcript": pa.array([item.transcript for item in recorded], pa.string()),
    }
    if any(rollout.shaped_reward is not None for rollout in rollouts):
        columns["shaped_reward"] = pa.array([rollout.shaped_reward for rollout in rollouts], pa.float64())
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.seconds):
        columns[f"seconds/{name}"] = pa.array([rollout.seconds.get(name) for rollout in rollouts], pa.float64())
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.stats):
        columns[f"stats/{name}"] = pa.array([rollout.stats.get(name) for rollout in rollouts], pa.int64())
    if tokens:
        segments = [[_segment_row(segment) for segment in rollout.segments] for rollout in rollouts]
        columns["segments"] = pa.array(segments, _segments_type())
    return pa.table(columns)


def _segment_row(segment: Segment) -> dict[str, object]:
    return {
        "token_ids": segment.token_ids,
        "sampled": segment.sampled,
        "logprobs": segment.logprobs,
        "versions": segment.versions,
    }


def _segments_type() -> Any:
    fields = {"token_ids": pa.int32(), "sampled": pa.bool_(), "logprobs": pa.float32(), "versions": pa.int32()}
    return pa.list_(pa.struct([(name, pa.list_(kind)) for name, kind in fields.items()]))
