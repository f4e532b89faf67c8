"""Which column is which: by name, by alias, by `--map`, and never by a guess."""

import pytest

from dockyard.errors import UsageError
from dockyard.tasks.rows import Column, match_columns, parse_mapping

COLUMNS = (
    Column(name="instance_id", about="a name", aliases=("task_id", "id")),
    Column(name="bug_patch", about="makes the bug", aliases=("bug_diff",)),
    Column(name="image", about="an image", aliases=("docker_image",), needed=False),
)


def match(*found: str, **mapping: str) -> dict[str, str]:
    return match_columns(COLUMNS, found, mapping, "rows.jsonl")


def test_columns_are_found_by_their_names_and_aliases():
    assert match("id", "bug_patch", "other") == {"instance_id": "id", "bug_patch": "bug_patch"}
    assert match("instance_id", "bug_diff", "docker_image")["image"] == "docker_image"


def test_our_own_name_wins_over_an_alias():
    assert match("id", "instance_id", "bug_patch")["instance_id"] == "instance_id"


def test_two_aliases_at_once_are_an_error():
    with pytest.raises(UsageError, match="has `task_id` and `id`, and both may be `instance_id`") as error:
        match("id", "task_id", "bug_patch")
    assert error.value.hint == "choose one, for example with `--map instance_id=task_id`"


def test_a_mapping_decides():
    assert match("id", "task_id", "bug_patch", instance_id="id")["instance_id"] == "id"
    assert match("key", "patch", instance_id="key", bug_patch="patch") == {"instance_id": "key", "bug_patch": "patch"}


def test_a_mapped_column_is_not_taken_twice():
    with pytest.raises(UsageError, match="has no column `instance_id`"):
        match("id", bug_patch="id")


def test_an_unknown_layout_shows_what_was_found_and_what_is_needed():
    with pytest.raises(UsageError) as error:
        match("key", "bug_patches")
    assert "has no column `instance_id`, `bug_patch`" in error.value.message
    assert "columns found: `key`, `bug_patches`" in error.value.message
    assert "`instance_id` (a name, also called `task_id`, `id`)" in error.value.message
    assert "`image`" not in error.value.message
    assert "`--map instance_id=" in error.value.hint


def test_a_mapping_to_nothing_is_misuse():
    with pytest.raises(UsageError, match="`inst_id` is not a known column") as error:
        match("id", inst_id="id")
    assert error.value.hint == "did you mean `instance_id`?"
    with pytest.raises(UsageError, match="has no column `nowhere`"):
        match("id", "bug_patch", image="nowhere")


def test_mappings_are_written_as_ours_and_theirs():
    assert parse_mapping(["a=b", "c=d=e", "a=b"]) == {"a": "b", "c": "d=e"}
    assert parse_mapping([]) == {}


@pytest.mark.parametrize("word", ["a", "=b", "a="])
def test_a_mapping_without_two_sides_is_misuse(word: str):
    with pytest.raises(UsageError, match="is not `ours=theirs`"):
        parse_mapping([word])


def test_a_column_cannot_be_mapped_to_two():
    with pytest.raises(UsageError, match="gives `a` twice"):
        parse_mapping(["a=b", "a=c"])
