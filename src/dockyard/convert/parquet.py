"""Parquet files written and read a few rows at a time."""

# pyarrow has no types of its own.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from dockyard.errors import DockyardError

_BUFFERED = 1 << 20
_BATCH = 64

type Column = tuple[str, str]
"""A name and one of the types below."""
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
    """Holds rows back until they are worth a row group."""

    def __init__(self, path: Path, columns: Sequence[Column]) -> None:
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
        """`size` is about how many numbers or letters it has."""
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
    """A `pyarrow.parquet.ParquetFile`. What is not one is named."""
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DockyardError(f"`{path}` cannot be read: {reason}", hint="is it whole, and a parquet file?") from error


def read_parquet(file: Any, path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Row after row, the named columns of a file that `open_parquet` gave."""
    try:
        for batch in file.iter_batches(_BATCH, columns=list(columns)):
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DockyardError(f"`{path}` is damaged: {reason}", hint="write or fetch the file anew") from error
