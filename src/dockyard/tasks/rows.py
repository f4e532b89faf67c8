"""Read dataset rows from JSONL, JSON and parquet files, or from a dataset on the Hugging Face Hub.

Columns are found by name, by a common alias, or by `--map ours=theirs`; they are never guessed. Rows that cannot be
read are reported with file and line, and the others are still read.
"""

import ast
import difflib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from dockyard.errors import DockyardError, UsageError
from dockyard.tasks.folder import Skipped, WrittenTasks
from dockyard.tasks.split import Selection

SUFFIXES = (".jsonl", ".json", ".parquet")
_ABOUT_THE_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json"}
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One row and its position."""

    where: str
    """The file."""
    number: int
    """From 1; the line in a JSONL file."""
    values: dict[str, Any]

    @property
    def place(self) -> str:
        """The position for messages."""
        return f"`{self.where}` row {self.number}"


@dataclass(frozen=True, slots=True)
class Rows:
    """The contents of a dataset."""

    source: str
    rows: list[DatasetRow] = field(default_factory=list[DatasetRow])
    skipped: list[Skipped] = field(default_factory=list[Skipped])
    """Lines and files that cannot be read."""

    @property
    def columns(self) -> list[str]:
        """The columns of all rows, in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))


def read_rows(source: str, *, split: str | None = None) -> Rows:
    """Read a file, the files of a folder, or a dataset of the Hub. `split` selects files by name."""
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
    """Parse a list in the form of JSON or of Python, which pandas writes. Return None for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _python_list(text.strip())
    return cast("list[Any]", value) if isinstance(value, list) else None


def _python_list(text: str) -> Any:
    """Accept only what Python itself writes: numpy's `['a' 'b']` would be read as one word."""
    try:
        value = ast.literal_eval(text)
        return value if repr(value) == text else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _read_file(source: str, file: Path, split: str | None) -> Rows:
    if split is not None:
        raise UsageError(f"`{source}` is a single file and has no split `{split}`", hint="remove `--split`")
    if file.suffix not in SUFFIXES:
        raise UsageError(f"`{source}` is not a file of rows", hint=f"supported files end in {', '.join(SUFFIXES)}")
    found = Rows(source)
    _read_into(found, file, source)
    return _not_empty(found)


def _files_of(source: str, folder: Path) -> list[Path]:
    inside = (file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.name not in _ABOUT_THE_DATA)
    files = sorted(file for file in inside if not any(part.startswith(".") for part in file.relative_to(folder).parts))
    if not files:
        raise DockyardError(
            f"`{source}` has no rows", hint=f"use a folder with files that end in {', '.join(SUFFIXES)}"
        )
    return files


def _in_split(source: str, folder: Path, files: list[Path], split: str | None) -> list[Path]:
    """Match the Hub's names: `test.jsonl`, `data/test-00000-of-00001.parquet`, `test/rows.parquet`."""
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
    """Read a file. Rows before an error are kept."""
    readers: dict[str, Callable[[Path], Iterator[Any]]] = {".parquet": _parquet, ".jsonl": _lines, ".json": _json}
    number = 0
    try:
        for number, value in enumerate(readers[file.suffix](file), start=1):
            if isinstance(value, dict):
                found.rows.append(DatasetRow(where, number, cast("dict[str, Any]", value)))
            elif isinstance(value, _Broken):
                found.skipped.append(Skipped(where=f"`{where}` row {number}", why=value.why))
            elif value is not None:
                found.skipped.append(Skipped(where=f"`{where}` row {number}", why="is not an object of columns"))
    except (OSError, ValueError) as error:  # pyarrow's errors derive from both
        reason = (str(error).splitlines() or ["no error message"])[0]
        found.skipped.append(Skipped(where=f"`{where}` after row {number}", why=f"cannot be read: {reason}"))


@dataclass(frozen=True, slots=True)
class _Broken:
    """A line that cannot be parsed."""

    why: str


def _lines(file: Path) -> Iterator[Any]:
    """Yield None for a blank line, so that line numbers stay correct."""
    with file.open("rb") as lines:
        for line in lines:
            yield _value(line) if line.strip() else None


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return _Broken(f"is not valid JSON: {error}")


def _json(file: Path) -> Iterator[Any]:
    """Read one list of rows, or one row per line as in JSONL."""
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
    rows: Sequence[DatasetRow], columns: Mapping[str, str], selection: Selection, written: WrittenTasks, where: str
) -> list[DatasetRow]:
    """Return the selected rows without applying the limit, which counts written tasks.

    Missing ids are recorded as skipped; they are an error only if all ids are missing.
    """

    def id_of(row: DatasetRow) -> str:
        return str(row.values.get(columns["instance_id"]))

    known, missing = replace(selection, limit=None).known({id_of(row) for row in rows})
    written.skipped += [Skipped(where=f"`{where}`", why=f"has no id `{name}`") for name in missing]
    return known.apply(rows, id_of=id_of, repo_of=lambda row: str(row.values.get(columns["repo"])), where=where)


logger = logging.getLogger(__name__)


def find_dataset(name: str, suffixes: Sequence[str]) -> Path:
    """Return the folder with the dataset's files that have these suffixes."""
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith(tuple(suffixes)):
        hint = "use the path of a file or folder, or a dataset of the Hub as `owner/name`"
        raise UsageError(f"there is no dataset `{name}`", hint=hint)
    logger.info("looking for the dataset %s on the Hub", name)
    return _fetched(name, [f"*{suffix}" for suffix in suffixes])


def _fetched(name: str, patterns: list[str]) -> Path:
    from httpx import HTTPError
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    reach = "check the network, or use a local file of the dataset"
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except HFValidationError:
        message, hint = (
            f"`{name}` is neither a local path nor a valid name on the Hub",
            "check the dataset's name or path",
        )
    except GatedRepoError:
        message, hint = (
            f"the terms of the dataset `{name}` have not been accepted",
            "accept them on the Hub, then `hf auth login`",
        )
    except RepositoryNotFoundError:
        message, hint = (
            f"the dataset `{name}` does not exist locally or on the Hub",
            "check the name, or `hf auth login`",
        )
    except (OSError, HTTPError) as error:  # the Hub's own errors are OSErrors
        if cached := _cached(name, patterns):
            return cached
        reason = (str(error).splitlines() or ["no error message"])[0]
        message, hint = f"the dataset `{name}` is not in the cache, and the Hub cannot be reached: {reason}", reach
    raise DockyardError(message, hint=hint)


def _cached(name: str, patterns: list[str]) -> Path | None:
    """Look in the cache, which the Hub's client does not do if a proxy refuses the connection."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column that Dockyard reads."""

    name: str
    about: str
    """A description of its contents."""
    aliases: tuple[str, ...] = ()
    """Names in other datasets."""
    needed: bool = True


def match_columns(
    columns: Sequence[Column], found: Collection[str], mapping: Mapping[str, str], where: str
) -> dict[str, str]:
    """Map Dockyard's names to the dataset's. Two candidates for one column are an error."""
    _check_mapping(columns, found, mapping, where)
    matched: dict[str, str] = {}
    for column in columns:
        theirs = [mapping[column.name]] if column.name in mapping else _candidates(column, found, mapping)
        if len(theirs) > 1:
            names = " and ".join(f"`{name}`" for name in theirs)
            raise UsageError(
                f"`{where}` has {names}, and both may be `{column.name}` ({column.about})",
                hint=f"choose one, for example with `--map {column.name}={theirs[0]}`",
            )
        if theirs:
            matched[column.name] = theirs[0]
    missing = [column for column in columns if column.needed and column.name not in matched]
    if missing:
        raise unknown_layout(columns, found, missing, where)
    return matched


def parse_mapping(words: Sequence[str]) -> dict[str, str]:
    """Parse the arguments of `--map`, each `ours=theirs`."""
    mapping: dict[str, str] = {}
    for word in words:
        ours, is_pair, theirs = word.partition("=")
        if not is_pair or not ours or not theirs:
            raise UsageError(f"`--map {word}` is not `ours=theirs`", hint="for example `--map bug_patch=patch`")
        if mapping.get(ours, theirs) != theirs:
            raise UsageError(
                f"`--map` gives `{ours}` twice: `{mapping[ours]}` and `{theirs}`", hint="remove one of them"
            )
        mapping[ours] = theirs
    return mapping


def unknown_layout(
    columns: Sequence[Column], found: Collection[str], missing: Sequence[Column], where: str
) -> UsageError:
    """Return an error that lists the found and the needed columns, with an example of `--map`."""
    lacks = ", ".join(f"`{column.name}`" for column in missing)
    there = ", ".join(f"`{name}`" for name in found) or "none"
    needed = "; ".join(_described(column) for column in columns if column.needed or column in missing)
    theirs = difflib.get_close_matches(missing[0].name, list(found), 1, cutoff=0.0) or ["THEIRS"]
    return UsageError(
        f"`{where}` has no column {lacks}\ncolumns found: {there}\ncolumns needed: {needed}",
        hint=f"name the column, for example with `--map {missing[0].name}={theirs[0]}`",
    )


def _described(column: Column) -> str:
    also = f", also called {', '.join(f'`{name}`' for name in column.aliases)}" if column.aliases else ""
    return f"`{column.name}` ({column.about}{also})"


def _candidates(column: Column, found: Collection[str], mapping: Mapping[str, str]) -> list[str]:
    """Dockyard's name takes precedence over aliases. Columns that are mapped explicitly are excluded."""
    taken = set(mapping.values())
    free = [name for name in (column.name, *column.aliases) if name in found and name not in taken]
    return free[:1] if column.name in free else free


def _check_mapping(columns: Sequence[Column], found: Collection[str], mapping: Mapping[str, str], where: str) -> None:
    ours = [column.name for column in columns]
    for name, theirs in mapping.items():
        if name not in ours:
            near = difflib.get_close_matches(name, ours, 1)
            hint = (
                f"did you mean `{near[0]}`?" if near else f"known columns are {', '.join(f'`{each}`' for each in ours)}"
            )
            raise UsageError(f"`--map {name}={theirs}`: `{name}` is not a known column", hint=hint)
        if theirs not in found:
            there = ", ".join(f"`{each}`" for each in found)
            raise UsageError(f"`--map {name}={theirs}`: `{where}` has no column `{theirs}`", hint=f"it has {there}")
