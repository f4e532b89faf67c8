"""Which sequences are run over one prefix; that nothing is lost, whatever is shared."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed_rows import example_of

from dockyard.rl import trees
from dockyard.rl.pack import Example
from dockyard.rl.trees import Tree, plant

SYSTEM = list(range(2000))


def example(*parts: list[int]) -> Example:
    ids = np.array([token for part in parts for token in part], np.int32)
    return Example(
        token_ids=ids, targets=np.array([len(ids) - 1], np.int32), old_logprobs=None, advantage=1.0, weight=1.0
    )


def shape(tree: Tree) -> tuple[int, list[int]]:
    return len(tree.prefix), [len(row.token_ids) for row in tree.rows]


def test_what_fits_one_row_needs_no_prefix():
    [tree] = plant([example(SYSTEM, [5000 + index] * 100) for index in range(4)], 3000)
    assert shape(tree) == (0, [2400])


def test_a_long_beginning_is_run_once_however_many_rows_follow():
    [tree] = plant([example(SYSTEM, [5000 + index] * 600) for index in range(6)], 1300)
    assert shape(tree) == (2000, [1200, 1200, 1200])
    assert tree.num_tokens == 2000 + 6 * 600


def test_each_group_has_a_prefix_of_its_own_if_all_have_little_in_common():
    groups = [[example(SYSTEM[:600], [9000 + g] * 3000, [5000 + i] * 700) for i in range(3)] for g in range(2)]
    grown = plant([item for group in groups for item in group], 1000)
    assert sorted(map(shape, grown)) == [(3600, [700, 700, 700])] * 2


def test_all_groups_have_one_prefix_if_that_is_most_of_them():
    groups = [[example(SYSTEM, [9000 + g] * 10, [5000 + i] * 700) for i in range(3)] for g in range(2)]
    [tree] = plant([item for group in groups for item in group], 1500)
    assert shape(tree) == (2000, [10 + 1400, 710 + 710, 10 + 1400])


def test_short_sequences_are_packed_together_beside_trees():
    long = [example(SYSTEM, [5000 + index] * 900) for index in range(4)]
    short = [example([7000 + index] * 100) for index in range(5)]
    assert sorted(map(shape, plant([*long, *short], 1000))) == [(0, [500]), (2000, [900] * 4)]


def test_any_number_of_sequences_may_begin_one_another():
    grown = plant([example(SYSTEM[: 100 + turn]) for turn in range(1500)], 200)
    assert sum(len(row.targets) for tree in grown for row in tree.rows) == 1500


def test_nothing_gives_no_trees():
    assert plant([], 1000) == []


def paths(tree: Tree) -> list[list[int]]:
    """Each trained token's own beginning and itself, read off the tree."""
    found: list[list[int]] = []
    for row in tree.rows:
        tokens = [*tree.prefix.tolist(), *row.token_ids.tolist()]
        ends = [*[len(tokens)] * row.start, *(row.ends + row.start).tolist()]
        for source, target in zip(row.sources.tolist(), row.targets.tolist(), strict=True):
            beginning = [token for at, token in enumerate(tokens[: source + 1]) if source < ends[at]]
            found.append([*beginning, target])
    return found


@pytest.mark.parametrize("worth", [1, 3])
@given(
    sequences=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=8),
    max_tokens=st.integers(1, 12),
)
def test_every_trained_token_is_there_once_with_exactly_its_own_beginning(
    sequences: list[list[int]], max_tokens: int, worth: int
):
    before = trees._WORTH_A_PASS
    trees._WORTH_A_PASS = worth  # pyright: ignore[reportConstantRedefinition]
    try:
        grown = plant([example_of(ids) for ids in sequences], max_tokens)
    finally:
        trees._WORTH_A_PASS = before  # pyright: ignore[reportConstantRedefinition]
    expected = sorted(ids[: at + 1] for ids in sequences for at in range(1, len(ids)))
    assert sorted(path for tree in grown for path in paths(tree)) == expected
    for tree in grown:
        for row in tree.rows:
            assert row.start == len(tree.prefix)
            above = [sum(row.ends[:index] > index) for index in range(len(row.ends))]
            assert (row.positions - row.start).tolist() == above
