"""Writes and reads files of samples: parquet, JSON and JSONL one sample at a time, and SLiME's `.pt`.

A file gets its name when it is complete. `.pt` needs memory for all samples, because SLiME reads one pickled list.
"""

import json
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dockyard.convert.samples import Sample
from dockyard.convert.slime_pt import load_slime, write_slime
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.durable import sync_folder

# pyarrow has no types of its own.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false


_BUFFERED = 1 << 20
_BATCH = 64
_MAX_LINE = 64 * 2**20

type ParquetColumn = tuple[str, str]
"""A column name and one of the types below."""
_TYPES: dict[str, Any] = {
    "int": pa.int64(),
    "number": pa.float64(),
    "text": pa.string(),
    "bool": pa.bool_(),
    "int32s": pa.list_(pa.int32()),
    "int8s": pa.list_(pa.int8()),
    "floats": pa.list_(pa.float32()),
    "messages": pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
}


class ParquetWriter:
    """Collects rows and writes them in row groups."""

    def __init__(self, path: Path, columns: Sequence[ParquetColumn]) -> None:
        self._schema = pa.schema([(name, _TYPES[kind]) for name, kind in columns])
        self._file = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[Mapping[str, Any]] = []
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._flush()
        finally:
            self._file.close()

    def write(self, row: Mapping[str, Any], size: int) -> None:
        """Add a row. `size` is its approximate number of numbers and characters."""
        self._rows.append(row)
        self._size += size
        if self._size >= _BUFFERED:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            columns = [pa.array([row[field.name] for row in self._rows], field.type) for field in self._schema]
            self._file.write_batch(pa.record_batch(columns, schema=self._schema))
        self._rows, self._size = [], 0


def open_parquet(path: Path) -> Any:
    """Open a `pyarrow.parquet.ParquetFile`. Errors name the file."""
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DockyardError(
            f"`{path}` cannot be read: {reason}", hint="check that it is a complete parquet file"
        ) from error


def read_parquet(file: Any, path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Read the named columns of a file from `open_parquet`, row by row."""
    try:
        for batch in file.iter_batches(_BATCH, columns=list(columns)):
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DockyardError(f"`{path}` is damaged: {reason}", hint="write or download the file again") from error


FORMATS = ("parquet", "json", "jsonl", "pt")
_COLUMNS: tuple[ParquetColumn, ...] = (
    ("group_index", "int"),
    ("index", "int"),
    ("rollout_id", "int"),
    ("prompt", "text"),
    ("tokens", "int32s"),
    ("response", "text"),
    ("response_length", "int"),
    ("label", "text"),
    ("reward", "number"),
    ("loss_mask", "int8s"),
    ("rollout_log_probs", "floats"),
    ("versions", "int32s"),
    ("status", "text"),
    ("remove_sample", "bool"),
    ("metadata", "text"),  # as JSON: its keys are free
)
_OPTIONAL = ("prompt", "response", "label", "rollout_id", "rollout_log_probs", "versions", "remove_sample", "metadata")


type _Write = Callable[[Sample], object]


@dataclass(frozen=True, slots=True)
class SampleWriter:
    """An open file that samples are written to."""

    path: Path
    _write: _Write

    def write(self, sample: Sample) -> None:
        """Write a sample, and refuse one that could not be read back."""
        logprobs = sample.rollout_log_probs
        for name, is_finite in (
            ("reward", sample.reward is None or math.isfinite(sample.reward)),
            ("rollout_log_probs", logprobs is None or bool(np.isfinite(logprobs).all())),
        ):
            if not is_finite:
                trial = sample.metadata.get("trial") or sample.label
                hint = "the value comes from its verifier or engine; leave the trial out"
                raise DockyardError(f"`{name}` of trial `{trial}` is not a finite number", hint=hint)
        with writing(self.path):
            self._write(sample)


@contextmanager
def open_writer(path: Path, format: str | None = None) -> Generator[SampleWriter]:  # noqa: A002
    """Open a file for writing, in the format of its suffix. It appears only if the block ends without an error."""
    open_draft = _WRITERS[_format_of(path, format)]
    with whole_file(path) as draft, ExitStack() as stack:
        with writing(path):
            write = stack.enter_context(open_draft(draft))
        yield SampleWriter(path, write)
        with writing(path):
            stack.close()


def read_samples(path: Path) -> Iterator[Sample]:
    """Read a file that `open_writer` wrote, or SLiME's debug `.pt`, sample by sample."""
    if not path.is_file():
        raise UsageError(f"`{path}` is not a file", hint="write one with `dockyard convert JOB_DIR --output FILE`")
    rows = _READERS[_format_of(path, None)](path)
    return (_sample(row, where) for where, row in rows)


def holds_samples(path: Path) -> bool:
    """Whether a file has samples that `dockyard convert` or SLiME wrote, by its suffix or its content."""
    if not path.is_file():
        return False
    if path.suffix == ".parquet":
        try:
            return "tokens" in pq.read_schema(path).names
        except (OSError, ValueError):
            return True  # reading it reports what is wrong
    if path.suffix in (".json", ".jsonl"):
        with path.open("rb") as file:
            first = file.readline(_MAX_LINE) if path.suffix == ".jsonl" else file.read(64).lstrip()
        return b'"tokens"' in first if path.suffix == ".jsonl" else first.startswith(b"[")
    return path.suffix == ".pt"


def _format_of(path: Path, format: str | None) -> str:  # noqa: A002
    name = format or path.suffix.removeprefix(".")
    if name not in FORMATS:
        known = ", ".join(f"`.{name}`" for name in FORMATS)
        raise UsageError(f"`{path}`: samples cannot be in the format `{name}`", hint=f"use one of the suffixes {known}")
    return name


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """A draft that is renamed to `path` if the block ends without an error, and removed otherwise."""
    draft = path.with_name(f".{path.name}.draft")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield draft
        with writing(path):
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(path)
            sync_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Name the file in errors of the disk."""
    try:
        yield
    except OSError as error:
        hint = "free some disk space, or write it elsewhere"
        raise DockyardError(f"cannot write `{path}`: {error.strerror or error}", hint=hint) from error


@contextmanager
def _write_parquet(draft: Path) -> Generator[_Write]:
    def write(sample: Sample) -> None:
        row: dict[str, Any] = {name: getattr(sample, name) for name, _ in _COLUMNS}
        row |= {"loss_mask": sample.loss_mask.astype(np.int8), "metadata": json.dumps(sample.metadata, allow_nan=False)}
        rows.write(row, len(sample.tokens))

    with ParquetWriter(draft, _COLUMNS) as rows:
        yield write


@contextmanager
def _write_json(draft: Path, *, begin: str, between: str, end: str) -> Generator[_Write]:
    separators = chain([""], repeat(between))

    def write(sample: Sample) -> None:
        text = json.dumps(sample.row(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        file.write(next(separators) + text)

    with draft.open("w", encoding="utf-8", errors="replace") as file:
        file.write(begin)
        yield write
        file.write(end)


type _Rows = Iterator[tuple[str, Any]]
"""Where a row was read, for errors, and the row."""


def _read_parquet(path: Path) -> _Rows:
    file = open_parquet(path)
    found: list[str] = file.schema_arrow.names
    missing = [name for name, _ in _COLUMNS if name not in found and name not in _OPTIONAL]
    if missing:
        raise DockyardError(
            f"`{path}` has no samples: its columns are {_named(found)}, and {_named(missing)} are missing",
            hint="`dockyard convert` writes samples, also from a trace file",
        )
    columns = [name for name, _ in _COLUMNS if name in found]
    for number, row in enumerate(read_parquet(file, path, columns), 1):
        yield f"`{path}` row {number}", row


def _sample(row: Any, where: str) -> Sample:
    if not isinstance(row, dict):
        raise DockyardError(f"{where} is not a sample", hint="write the file with `dockyard convert`")
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        row["metadata"] = _parse(metadata, f"`metadata` of {where}")
    given = {name: value for name, value in row.items() if value is not None}
    return Sample.of_row(given, where)


def _read_jsonl(path: Path) -> _Rows:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"`{path}` line {number}"
                yield where, _parse(line, where)


def _read_json(path: Path) -> _Rows:
    rows = _parse(path.read_bytes(), f"`{path}`")
    if not isinstance(rows, list):
        raise DockyardError(f"`{path}` is not a list of samples", hint="write it with `dockyard convert`")
    yield from _numbered(path, rows)


def _read_pt(path: Path) -> _Rows:
    yield from _numbered(path, load_slime(path))


def _numbered(path: Path, rows: list[Any]) -> _Rows:
    return ((f"`{path}` sample {number}", row) for number, row in enumerate(rows, 1))


def _parse(text: str | bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DockyardError(
            f"{where} is not JSON: {error}", hint="the file may be incomplete; write it again"
        ) from error


def _named(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_WRITERS: dict[str, Callable[[Path], AbstractContextManager[_Write]]] = {
    "parquet": _write_parquet,
    "json": partial(_write_json, begin="[\n", between=",\n", end="\n]\n"),
    "jsonl": partial(_write_json, begin="", between="\n", end="\n"),
    "pt": write_slime,
}
_READERS: dict[str, Callable[[Path], _Rows]] = {
    "parquet": _read_parquet,
    "json": _read_json,
    "jsonl": _read_jsonl,
    "pt": _read_pt,
}
