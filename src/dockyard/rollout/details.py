"""Token ids and logprobs that an agent of Harbor's kept (`rollout_details`) become segments.

Terminus-2 stores the whole prompt of every turn. A turn's prompt need not begin with the turn before it: turns that
were cut at the token limit are missing, histories are summarised, thoughts are dropped. So each prompt is compared with
what came before, and where it does not go on from there a new segment begins.
"""

# pyright: reportMissingTypeStubs=false

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from harbor.models.agent.rollout_detail import RolloutDetail

from dockyard.sequences import common_prefix
from dockyard.types import FloatArray, IntArray, Segment


@dataclass(frozen=True, slots=True)
class _Turn:
    prompt_ids: IntArray
    sampled_ids: IntArray
    logprobs: FloatArray | None


def segments_of(details: Sequence[RolloutDetail]) -> tuple[Segment, ...]:
    """Of the main chat, then of the summarisations. Weight versions are not known."""
    return tuple(segment for detail in details for segment in _stitch(_turns(detail)))


def num_turns(details: Sequence[RolloutDetail]) -> int:
    """How many answers of the model are known to have come."""
    return sum(max(map(len, (d.get("prompt_token_ids", []), d.get("completion_token_ids", [])))) for d in details)


def _turns(detail: RolloutDetail) -> list[_Turn]:
    """Empty where it cannot be told which answer belongs to which prompt: each list is filled independently."""
    prompts, sampled = detail.get("prompt_token_ids", []), detail.get("completion_token_ids", [])
    if len(prompts) != len(sampled):
        return []
    logprobs = detail.get("logprobs", [])
    aligned = [*map(len, logprobs)] == [*map(len, sampled)] and all(np.isfinite(turn).all() for turn in logprobs)
    return [
        _Turn(
            np.array(prompt, np.int32),
            np.array(ids, np.int32),
            np.array(logprobs[number], np.float32) if aligned else None,
        )
        for number, (prompt, ids) in enumerate(zip(prompts, sampled, strict=True))
        if ids
    ]


def _stitch(turns: Sequence[_Turn]) -> Iterator[Segment]:
    """Turns whose prompts go on from one another, joined."""
    chain: list[_Turn] = []
    seen = np.array([], np.int32)
    for turn in turns:
        if chain and common_prefix(seen, turn.prompt_ids) < len(seen):
            yield _segment(chain)
            chain = []
        chain.append(turn)
        seen = np.concatenate([turn.prompt_ids, turn.sampled_ids])
    if chain:
        yield _segment(chain)


def _segment(chain: Sequence[_Turn]) -> Segment:
    last = chain[-1]
    token_ids = np.concatenate([last.prompt_ids, last.sampled_ids])
    sampled = np.zeros(len(token_ids), np.bool_)
    logprobs = np.zeros(len(token_ids), np.float32)
    for turn in chain:
        place = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.sampled_ids))
        sampled[place] = True
        logprobs[place] = 0 if turn.logprobs is None else turn.logprobs
    known = all(turn.logprobs is not None for turn in chain)
    return Segment(token_ids=token_ids, sampled=sampled, logprobs=logprobs if known else None, versions=None)
