"""Which sequences share a row."""

import numpy as np

from dockyard.rl.pack import Example, pack


def example(*parts: list[int]) -> Example:
    ids = np.array([token for part in parts for token in part], np.int32)
    return Example(
        token_ids=ids, targets=np.array([len(ids) - 1], np.int32), old_logprobs=None, advantage=1.0, weight=1.0
    )


PROMPT = list(range(1000))


def test_a_prompt_longer_than_a_row_is_computed_once_for_all_that_begin_with_it():
    [row] = pack([example(PROMPT, [5000 + index]) for index in range(20)], 800)
    assert len(row.token_ids) == 1020
    assert sorted(row.targets.tolist()) == list(range(5000, 5020))


def test_a_long_row_takes_in_a_quarter_of_a_row_at_most():
    rows = pack([example(PROMPT, [5000 + index] * 90) for index in range(4)], 800)
    assert [len(row.token_ids) for row in rows] == [1270, 1090]


def test_sequences_that_fit_keep_to_the_limit():
    rows = pack([example([index] * 300) for index in range(4)], 800)
    assert [len(row.token_ids) for row in rows] == [600, 600]
