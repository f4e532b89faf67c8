"""Rows of datasets: every format, what cannot be read, splits, and the Hub's cache."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from dockyard.errors import DockyardError, UsageError
from dockyard.tasks.rows import read_list, read_rows

ROWS = [{"id": "a", "tests": ["x", "y"]}, {"id": "b", "tests": []}]


def write(file: Path, rows: list[dict[str, object]] = ROWS) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str):
    file = write(tmp_path / f"rows{suffix}")
    found = read_rows(str(file))
    assert [row.values for row in found.rows] == ROWS
    assert [row.place for row in found.rows] == [f"`{file}` row 1", f"`{file}` row 2"]
    assert (found.columns, found.skipped) == (["id", "tests"], [])


def test_a_json_file_may_hold_one_row_per_line(tmp_path: Path):
    file = tmp_path / "rows.json"
    file.write_text('{"id": "a"}\n{"id": "b"}\n')
    assert [row.values["id"] for row in read_rows(str(file)).rows] == ["a", "b"]


def test_a_corrupt_line_is_named_and_the_rest_is_read(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"id": "a"}\n{"id": \n\n[1]\n{"id": "\xff"}\n{"id": "e"}\n{"id": "f')
    found = read_rows(str(file))
    assert [(row.number, row.values["id"]) for row in found.rows] == [(1, "a"), (6, "e")]
    assert [row.where for row in found.skipped] == [f"`{file}` row {number}" for number in (2, 4, 5, 7)]
    assert found.skipped[0].why.startswith("is not valid JSON")
    assert found.skipped[1].why == "is not an object of columns"


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_row_that_is_nested_too_deeply_is_named(tmp_path: Path, suffix: str):
    file = tmp_path / f"rows{suffix}"
    file.write_text('{"id": "a"}\n{"id": ' + "[" * 100_000 + "]" * 100_000 + '}\n{"id": "c"}\n')
    found = read_rows(str(file))
    assert [row.values["id"] for row in found.rows] == ["a", "c"]
    assert [row.where for row in found.skipped] == [f"`{file}` row 2"]


def test_a_list_is_read_only_where_it_is_surely_one():
    assert read_list('["a", "b"]') == ["a", "b"]
    assert read_list(" ['a', \"it's\"]\n") == ["a", "it's"]
    assert [read_list(text) for text in ("['a' 'b']", "['a'", "a", "{}", "[" * 100_000, "[f()]")] == [None] * 6


def test_a_file_that_is_cut_off_does_not_hide_the_others(tmp_path: Path):
    whole = write(tmp_path / "data" / "b.parquet")
    (tmp_path / "data" / "a.parquet").write_bytes(whole.read_bytes()[:100])
    found = read_rows(str(tmp_path / "data"))
    assert len(found.rows) == 2
    [broken] = found.skipped
    assert "a.parquet" in broken.where
    assert broken.why.startswith("cannot be read: ")


def test_what_describes_a_dataset_is_not_rows(tmp_path: Path):
    write(tmp_path / "test.jsonl")
    write(tmp_path / "dataset_infos.json", [{"splits": "x"}])
    write(tmp_path / ".hidden" / "other.jsonl")
    assert len(read_rows(str(tmp_path)).rows) == 2


@pytest.mark.parametrize("name", ["test.jsonl", "data/test-00000-of-00001.parquet", "test/rows.jsonl", "my_test.json"])
def test_a_split_is_the_files_of_its_name(tmp_path: Path, name: str):
    write(tmp_path / name)
    write(tmp_path / "train.jsonl")
    write(tmp_path / "latest.jsonl")
    assert {row.where for row in read_rows(str(tmp_path), split="test").rows} == {f"{tmp_path}/{name}"}


def test_an_unknown_split_is_an_error_that_names_the_files(tmp_path: Path):
    write(tmp_path / "train.jsonl")
    with pytest.raises(UsageError, match="has no split `test`") as error:
        read_rows(str(tmp_path), split="test")
    assert "`train.jsonl`" in error.value.hint


def test_one_file_has_no_splits(tmp_path: Path):
    file = write(tmp_path / "train.jsonl")
    with pytest.raises(UsageError, match="has no split"):
        read_rows(str(file), split="train")


def test_an_empty_dataset_is_an_error(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(DockyardError, match="rows.jsonl` is empty"):
        read_rows(str(tmp_path / "rows.jsonl"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DockyardError, match="has no rows"):
        read_rows(str(tmp_path / "nothing"))


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere", "one", "a/b/c", "owner/rows.parquet"])
def test_what_is_neither_here_nor_a_name_of_the_hub_is_misuse(name: str):
    with pytest.raises(UsageError, match="there is no dataset"):
        read_rows(name)


def test_a_file_of_another_kind_is_misuse(tmp_path: Path):
    (tmp_path / "rows.csv").write_text("id\na\n")
    with pytest.raises(UsageError, match="is not a file of rows"):
        read_rows(str(tmp_path / "rows.csv"))


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the Hub's client keeps datasets, without a way to the Hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_dataset_of_the_hub_is_read_from_its_cache(hub_cache: Path):
    kept = hub_cache / "datasets--owner--bugs"
    write(kept / "snapshots" / ("0" * 40) / "data" / "test-00000.parquet")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    found = read_rows("owner/bugs", split="test")
    assert found.rows[0].place == "`owner/bugs/data/test-00000.parquet` row 1"


def test_a_dataset_that_is_not_kept_and_cannot_be_fetched_is_an_error(hub_cache: Path):
    with pytest.raises(DockyardError, match="`owner/bugs` is not in the cache, and the Hub cannot be reached"):
        read_rows("owner/bugs")
