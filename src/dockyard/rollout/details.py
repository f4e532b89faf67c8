"""Turns of which the whole prompt is known become segments: those an agent of Harbor's kept, and those made from text.

Terminus-2 stores the whole prompt of every turn. A turn's prompt need not begin with the turn before it: turns that
were cut at the token limit are missing, histories are summarised, thoughts are dropped. So each prompt is compared with
what came before, and where it does not go on from there a new segment begins.
"""

# pyright: reportMissingTypeStubs=false

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from harbor.models.agent.rollout_detail import RolloutDetail

from dockyard.types import FloatArray, IntArray, Segment, common_prefix


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """One answer of the model after the whole prompt it was given."""

    prompt_ids: IntArray
    sampled_ids: IntArray
    logprobs: FloatArray | None = None

    @classmethod
    def of(cls, prompt: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float] | None = None) -> Self:
        """Logprobs that do not fit the tokens, or are no numbers, are left out."""
        fits = logprobs is not None and len(logprobs) == len(sampled) and bool(np.isfinite(logprobs).all())
        kept = np.array(logprobs, np.float32) if fits else None
        return cls(np.array(prompt, np.int32), np.array(sampled, np.int32), kept)


def segments_of(details: Sequence[RolloutDetail]) -> tuple[Segment, ...]:
    """Of the main chat, then of the summarisations. Weight versions are not known."""
    return tuple(segment for detail in details for segment in stitch(_turns(detail)))


def num_turns(details: Sequence[RolloutDetail]) -> int:
    """How many answers of the model are known to have come."""
    return sum(max(map(len, (d.get("prompt_token_ids", []), d.get("completion_token_ids", [])))) for d in details)


def _turns(detail: RolloutDetail) -> list[KeptTurn]:
    """Empty where it cannot be told which answer belongs to which prompt: each list is filled independently."""
    prompts, sampled = detail.get("prompt_token_ids", []), detail.get("completion_token_ids", [])
    if len(prompts) != len(sampled):
        return []
    logprobs = detail.get("logprobs", [])
    aligned = [*map(len, logprobs)] == [*map(len, sampled)]  # if one does not fit, the others may have shifted
    known = logprobs if aligned else [None] * len(sampled)
    turns = zip(prompts, sampled, known, strict=True)
    return [KeptTurn.of(prompt, ids, logs) for prompt, ids, logs in turns if ids]


def stitch(turns: Iterable[KeptTurn]) -> Iterator[Segment]:
    """Turns whose prompts go on from one another, joined."""
    seen, answers = np.array([], np.int32), list[_Answer]()
    for turn in turns:
        if answers and common_prefix(seen, turn.prompt_ids) < len(seen):
            yield _segment(seen, answers)
            answers = []
        answers.append(_Answer(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.sampled_ids), turn.logprobs))
        seen = np.concatenate([turn.prompt_ids, turn.sampled_ids])
    if answers:
        yield _segment(seen, answers)


@dataclass(frozen=True, slots=True)
class _Answer:
    """Where in a segment the model spoke."""

    start: int
    end: int
    logprobs: FloatArray | None


def _segment(token_ids: IntArray, answers: Sequence[_Answer]) -> Segment:
    sampled = np.zeros(len(token_ids), np.bool_)
    logprobs = np.zeros(len(token_ids), np.float32)
    for answer in answers:
        sampled[answer.start : answer.end] = True
        logprobs[answer.start : answer.end] = 0 if answer.logprobs is None else answer.logprobs
    known = all(answer.logprobs is not None for answer in answers)
    return Segment(token_ids=token_ids, sampled=sampled, logprobs=logprobs if known else None, versions=None)
