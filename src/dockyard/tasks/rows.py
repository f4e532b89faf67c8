"""The rows of a dataset: of JSONL, JSON and parquet files here, or of a dataset on the Hugging Face Hub.

What cannot be read is named with its file and line, and the rest is read all the same.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from dockyard.errors import DockyardError, UsageError
from dockyard.tasks.folder import Skipped, Written
from dockyard.tasks.hub import find_dataset
from dockyard.tasks.select import Selection

SUFFIXES = (".jsonl", ".json", ".parquet")
_ABOUT_THE_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json"}
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One row, and where it stands."""

    where: str
    """The file."""
    number: int
    """From 1; of a JSONL file the line."""
    values: dict[str, Any]

    @property
    def place(self) -> str:
        """For messages."""
        return f"`{self.where}` row {self.number}"


@dataclass(frozen=True, slots=True)
class Rows:
    """What a dataset held."""

    source: str
    rows: list[Row] = field(default_factory=list[Row])
    skipped: list[Skipped] = field(default_factory=list[Skipped])
    """Lines and files that cannot be read."""

    @property
    def columns(self) -> list[str]:
        """Every column of any row, in the order in which they appear."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))


def read_rows(source: str, *, split: str | None = None) -> Rows:
    """The rows of a file, of the files in a folder, or of a dataset of the Hub; `split` takes the files named so."""
    path = Path(source).expanduser()
    if path.is_file():
        return _read_file(source, path, split)
    folder = path if path.is_dir() else find_dataset(source, SUFFIXES)
    files = _in_split(source, folder, _files_of(source, folder), split)
    found = Rows(source)
    for file in files:
        _read_into(found, file, f"{source.rstrip('/')}/{file.relative_to(folder).as_posix()}")
    return _not_empty(found)


def read_list(text: str) -> list[Any] | None:
    """A list that is written as JSON, or as Python and so pandas writes it; None for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _python_list(text.strip())
    return cast("list[Any]", value) if isinstance(value, list) else None


def _python_list(text: str) -> Any:
    """Only what Python itself would write: `['a' 'b']`, an array of numpy's, would be read as one word."""
    try:
        value = ast.literal_eval(text)
        return value if repr(value) == text else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _read_file(source: str, file: Path, split: str | None) -> Rows:
    if split is not None:
        raise UsageError(f"`{source}` is one file and has no split `{split}`", hint="leave out `--split`")
    if file.suffix not in SUFFIXES:
        raise UsageError(f"`{source}` is not a file of rows", hint=f"one ends in {', '.join(SUFFIXES)}")
    found = Rows(source)
    _read_into(found, file, source)
    return _not_empty(found)


def _files_of(source: str, folder: Path) -> list[Path]:
    inside = (file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.name not in _ABOUT_THE_DATA)
    files = sorted(file for file in inside if not any(part.startswith(".") for part in file.relative_to(folder).parts))
    if not files:
        raise DockyardError(f"`{source}` holds no rows", hint=f"give a folder with files in {', '.join(SUFFIXES)}")
    return files


def _in_split(source: str, folder: Path, files: list[Path], split: str | None) -> list[Path]:
    """As the Hub names them: `test.jsonl`, `data/test-00000-of-00001.parquet`, `test/rows.parquet`."""
    if split is None:
        return files
    named = re.compile(rf"(?:^|.*[-_.]){re.escape(split)}(?:[-_.].*|$)")
    chosen = [file for file in files if any(named.match(part) for part in file.relative_to(folder).parts)]
    if not chosen:
        names = [file.relative_to(folder).as_posix() for file in files]
        shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise UsageError(f"`{source}` has no split `{split}`", hint=f"its files are {shown}{more}")
    return chosen


def _not_empty(found: Rows) -> Rows:
    if not found.rows and not found.skipped:
        raise DockyardError(f"`{found.source}` is empty: it has no rows", hint="check the dataset's name or file")
    return found


def _read_into(found: Rows, file: Path, where: str) -> None:
    """A file that cannot be read as a whole keeps the rows that were read before."""
    readers: dict[str, Callable[[Path], Iterator[Any]]] = {".parquet": _parquet, ".jsonl": _lines, ".json": _json}
    number = 0
    try:
        for number, value in enumerate(readers[file.suffix](file), start=1):
            if isinstance(value, dict):
                found.rows.append(Row(where, number, cast("dict[str, Any]", value)))
            elif isinstance(value, _Broken):
                found.skipped.append(Skipped(where=f"`{where}` row {number}", why=value.why))
            elif value is not None:
                found.skipped.append(Skipped(where=f"`{where}` row {number}", why="is not an object of columns"))
    except (OSError, ValueError) as error:  # pyarrow's errors are both
        reason = (str(error).splitlines() or ["no reason given"])[0]
        found.skipped.append(Skipped(where=f"`{where}` after row {number}", why=f"cannot be read: {reason}"))


@dataclass(frozen=True, slots=True)
class _Broken:
    """A line that holds no value."""

    why: str


def _lines(file: Path) -> Iterator[Any]:
    """None for a blank line: the lines keep their numbers."""
    with file.open("rb") as lines:
        for line in lines:
            yield _value(line) if line.strip() else None


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return _Broken(f"is not valid JSON: {error}")


def _json(file: Path) -> Iterator[Any]:
    """One list of rows, or one row after the other as in JSONL."""
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        yield from _lines(file)
        return
    yield from cast("list[Any]", values) if isinstance(values, list) else [values]


def _parquet(file: Path) -> Iterator[Any]:
    from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]

    with cast("Any", parquet).ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=256):
            yield from batch.to_pylist()


def choose_rows(
    rows: Sequence[Row], columns: Mapping[str, str], selection: Selection, written: Written, where: str
) -> list[Row]:
    """Those that are asked for, however many: the limit counts tasks, and many of these may be bad.

    Ids that are not there are named, and are an error only where no other is asked for.
    """

    def id_of(row: Row) -> str:
        return str(row.values.get(columns["instance_id"]))

    known, missing = replace(selection, limit=None).known({id_of(row) for row in rows})
    written.skipped += [Skipped(where=f"`{where}`", why=f"has no id `{name}`") for name in missing]
    return known.apply(rows, id_of=id_of, repo_of=lambda row: str(row.values.get(columns["repo"])), where=where)
