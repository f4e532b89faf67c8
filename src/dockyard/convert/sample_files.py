"""Writes and reads files of samples: parquet, JSON and JSONL one sample at a time, and SLiME's `.pt`.

A file gets its name when it is complete. `.pt` needs memory for all samples, because SLiME reads one pickled list.
"""

import json
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dockyard.convert.sample import Sample
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.durable import sync_folder

# pyarrow has no types of its own.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false


_BUFFERED = 1 << 20
_BATCH = 64

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


class SampleWriter(Protocol):
    """An open file that samples are written to."""

    def write(self, sample: Sample) -> None: ...


@contextmanager
def open_writer(path: Path, format: str | None = None) -> Generator[SampleWriter]:  # noqa: A002
    """Open a file for writing, in the format of its suffix. It appears only if the block ends without an error."""
    open_draft = _WRITERS[_format_of(path, format)]
    with whole_file(path) as draft, ExitStack() as stack:
        with writing(path):
            writer = stack.enter_context(open_draft(draft))
        yield _Checked(writer, path)
        with writing(path):
            stack.close()


def read_samples(path: Path) -> Iterator[Sample]:
    """Read a file that `open_writer` wrote, or SLiME's debug `.pt`, sample by sample."""
    if not path.is_file():
        raise UsageError(f"`{path}` is not a file", hint="write one with `dockyard convert JOB_DIR --output FILE`")
    return _READERS[_format_of(path, None)](path)


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
            _finish(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _finish(draft: Path, path: Path) -> None:
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Name the file in errors of the disk."""
    try:
        yield
    except OSError as error:
        hint = "free some disk space, or write it elsewhere"
        raise DockyardError(f"cannot write `{path}`: {error.strerror or error}", hint=hint) from error


class _Checked:
    """Refuses samples that could not be read back."""

    def __init__(self, writer: SampleWriter, path: Path) -> None:
        self._writer = writer
        self._path = path

    def write(self, sample: Sample) -> None:
        logprobs = sample.rollout_log_probs
        for name, is_finite in (
            ("reward", sample.reward is None or math.isfinite(sample.reward)),
            ("rollout_log_probs", logprobs is None or bool(np.isfinite(logprobs).all())),
        ):
            if not is_finite:
                trial = sample.metadata.get("trial") or sample.label
                hint = "the value comes from its verifier or engine; leave the trial out"
                raise DockyardError(f"`{name}` of trial `{trial}` is not a finite number", hint=hint)
        with writing(self._path):
            self._writer.write(sample)


class _ParquetSamples:
    def __init__(self, rows: ParquetWriter) -> None:
        self._rows = rows

    def write(self, sample: Sample) -> None:
        row: dict[str, Any] = {name: getattr(sample, name) for name, _ in _COLUMNS}
        row |= {"loss_mask": sample.loss_mask.astype(np.int8), "metadata": json.dumps(sample.metadata, allow_nan=False)}
        self._rows.write(row, len(sample.tokens))


class _JsonSamples:
    def __init__(self, file: Any, between: str) -> None:
        self._file = file
        self._between = between
        self._next = ""

    def write(self, sample: Sample) -> None:
        self._file.write(self._next + _to_json(sample.row()))
        self._next = self._between


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@contextmanager
def _write_parquet(draft: Path) -> Generator[SampleWriter]:
    with ParquetWriter(draft, _COLUMNS) as rows:
        yield _ParquetSamples(rows)


@contextmanager
def _write_json(draft: Path) -> Generator[SampleWriter]:
    with draft.open("w", encoding="utf-8", errors="replace") as file:
        file.write("[\n")
        yield _JsonSamples(file, ",\n")
        file.write("\n]\n")


@contextmanager
def _write_jsonl(draft: Path) -> Generator[SampleWriter]:
    with draft.open("w", encoding="utf-8", errors="replace") as file:
        yield _JsonSamples(file, "\n")
        file.write("\n")


@contextmanager
def _write_pt(draft: Path) -> Generator[SampleWriter]:
    from dockyard.convert.slime_pt import SlimeSamples

    samples = SlimeSamples()
    yield samples
    samples.save(draft)


def _read_parquet(path: Path) -> Iterator[Sample]:
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
        where = f"`{path}` row {number}"
        yield _sample(row, where)


def _sample(row: dict[str, Any], where: str) -> Sample:
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        row["metadata"] = _parse(metadata, f"`metadata` of {where}")
    given = {name: value for name, value in row.items() if value is not None}
    return Sample.of_row(given, where)


def _read_jsonl(path: Path) -> Iterator[Sample]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"`{path}` line {number}"
                yield _sample(_object(_parse(line, where), where), where)


def _read_json(path: Path) -> Iterator[Sample]:
    rows = _parse(path.read_bytes(), f"`{path}`")
    if not isinstance(rows, list):
        raise DockyardError(f"`{path}` is not a list of samples", hint="write it with `dockyard convert`")
    for number, row in enumerate(rows, 1):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        where = f"`{path}` sample {number}"
        yield _sample(_object(row, where), where)


def _read_pt(path: Path) -> Iterator[Sample]:
    from dockyard.convert.slime_pt import load_slime

    for number, row in enumerate(load_slime(path), 1):
        where = f"`{path}` sample {number}"
        yield _sample(_object(row, where), where)


def _parse(text: str | bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DockyardError(
            f"{where} is not JSON: {error}", hint="the file may be incomplete; write it again"
        ) from error


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DockyardError(f"{where} is not a sample", hint="write the file with `dockyard convert`")
    return row  # pyright: ignore[reportUnknownVariableType]


def _named(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_WRITERS: dict[str, Callable[[Path], Any]] = {
    "parquet": _write_parquet,
    "json": _write_json,
    "jsonl": _write_jsonl,
    "pt": _write_pt,
}
_READERS: dict[str, Callable[[Path], Iterator[Sample]]] = {
    "parquet": _read_parquet,
    "json": _read_json,
    "jsonl": _read_jsonl,
    "pt": _read_pt,
}
