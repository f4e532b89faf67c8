"""Segments from the token ids that a Harbor agent stored in its `rollout_details`.

Terminus-2 stores the whole prompt of every turn. A prompt need not start with the turn before it: turns that were cut
at the token limit are missing, histories are summarised, reasoning is dropped. `stitch_turns` compares the ids and
starts a new segment where a prompt does not continue an earlier turn.
"""

# pyright: reportMissingTypeStubs=false

from collections.abc import Sequence

import numpy as np
from harbor.models.agent.rollout_detail import RolloutDetail

from dockyard.gateway.token_tree import stitch_turns
from dockyard.types import Segment, Turn


def stored_turn(prompt: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float] | None = None) -> Turn:
    """A turn from stored lists. Logprobs are left out if their number differs from the ids', or one is not finite."""
    fits = logprobs is not None and len(logprobs) == len(sampled) and bool(np.isfinite(logprobs).all())
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.array(logprobs, np.float32) if fits else None,
    )


def segments_of(details: Sequence[RolloutDetail]) -> tuple[Segment, ...]:
    """The segments of the main chat, then of the summarisations. Weight versions are not known."""
    return tuple(segment for detail in details for segment in stitch_turns(_turns(detail)))


def num_turns(details: Sequence[RolloutDetail]) -> int:
    """The number of model replies that the details show."""
    return sum(max(map(len, (d.get("prompt_token_ids", []), d.get("completion_token_ids", [])))) for d in details)


def _turns(detail: RolloutDetail) -> list[Turn]:
    """Empty if prompts and replies cannot be paired: Harbor fills each list independently."""
    prompts, sampled = detail.get("prompt_token_ids", []), detail.get("completion_token_ids", [])
    if len(prompts) != len(sampled):
        return []
    logprobs = detail.get("logprobs", [])
    aligned = [*map(len, logprobs)] == [*map(len, sampled)]  # if one does not fit, the others may be shifted
    known = logprobs if aligned else [None] * len(sampled)
    turns = zip(prompts, sampled, known, strict=True)
    return [stored_turn(prompt, ids, logs) for prompt, ids, logs in turns if ids]
