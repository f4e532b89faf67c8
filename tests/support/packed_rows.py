"""Packed rows for tests: sequences laid out as the trie of their beginnings."""

import numpy as np

from dockyard.rl.pack import Example, PackedRow, pack


def example_of(ids: list[int]) -> Example:
    """All tokens but the first are trained."""
    return Example(
        token_ids=np.array(ids, np.int32),
        targets=np.arange(1, len(ids), dtype=np.int32),
        old_logprobs=None,
        advantage=1.0,
        weight=1.0,
    )


def row_of(*sequences: list[int]) -> PackedRow:
    [row] = pack([example_of(ids) for ids in sequences], 10_000)
    return row


def random_row() -> PackedRow:
    """Three that begin alike, two of which go on alike, one that leaves early, one of its own."""
    rng = np.random.default_rng(0)
    prompt, turn = rng.integers(0, 9, 20).tolist(), rng.integers(0, 9, 7).tolist()
    ends = [rng.integers(0, 9, 5 + index).tolist() for index in range(3)]
    return row_of(
        [*prompt, 10, *turn, 11, *ends[0]],
        [*prompt, 10, *turn, 12, *ends[1]],
        [*prompt, 13, *ends[2]],
        [*prompt[:6], 14, 15, 16],
        [17, 18, *prompt],
    )
