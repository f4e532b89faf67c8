"""Keys and values of the requests being decoded, and of finished ones that later prompts may begin with.

Rows are right-aligned: every row's newest token sits in the same column, so one forward pass appends to all of them.
Everything here belongs to one version of the weights; the engine clears it when new weights arrive.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dockyard.sequences import common_prefix
from dockyard.types import IntArray

_SPARE_COLUMNS = 64  # room to append before the buffers are laid out anew


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's keys and values look like in one layer."""

    num_layers: int
    num_heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype


class KVRows:
    """A batch of right-aligned rows. `end` is one past the newest column; row i begins at column `starts[i]`."""

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        self._layers: list[Tensor] = [self._empty(0, 0) for _ in range(shape.num_layers)]
        self.starts: list[int] = []
        self.end = 0

    def _empty(self, rows: int, columns: int) -> Tensor:
        size = (2, rows, self._shape.num_heads, columns, self._shape.head_dim)
        return torch.zeros(size, device=self._shape.device, dtype=self._shape.dtype)

    def add(self, lengths: list[int], prefixes: "list[Prefix | None]") -> None:
        """Append rows of these total lengths; the known beginning of each is copied in, the rest is to be written."""
        rows, end = len(self.starts) + len(lengths), max(self.end, *lengths)
        _, row_capacity, _, column_capacity, _ = self._layers[0].shape
        if end > self.end or rows > row_capacity or end > column_capacity:
            self._lay_out(rows, max(self._width(), *lengths))
        for length, prefix in zip(lengths, prefixes, strict=True):
            row, start = len(self.starts), self.end - length
            self.starts.append(start)
            if prefix is not None:
                for layer, known in zip(self._layers, prefix.layers, strict=True):
                    layer[:, row, :, start : start + prefix.length] = known[:, :, : prefix.length]

    def grow(self) -> None:
        """Make room for one more token in every row."""
        if self.end == self._layers[0].shape[3]:
            self._lay_out(len(self.starts), self._width())
        self.end += 1

    def _width(self) -> int:
        return self.end - min(self.starts, default=self.end)

    def _lay_out(self, rows: int, end: int) -> None:
        """Move to new buffers with room for this many rows, the present ones ending at this column."""
        used, width = len(self.starts), self._width()
        row_capacity = max(rows, self._layers[0].shape[1])
        for index, old in enumerate(self._layers):
            new = self._empty(row_capacity, end + _SPARE_COLUMNS)
            new[:, :used, :, end - width : end] = old[:, :used, :, self.end - width : self.end]
            self._layers[index] = new
        self.starts = [start + end - self.end for start in self.starts]
        self.end = end

    def remove(self, row: int) -> None:
        """Drop a row; the last one takes its place."""
        last = len(self.starts) - 1
        if row != last:
            for layer in self._layers:
                layer[:, row] = layer[:, last]
            self.starts[row] = self.starts[last]
        self.starts.pop()

    def extract(self, row: int) -> list[Tensor]:
        """A copy of one row's keys and values, per layer `[2, heads, tokens, dim]`."""
        return [layer[:, row, :, self.starts[row] : self.end].clone() for layer in self._layers]

    def window(self, first_row: int, columns: slice, valid: Tensor) -> "KVWindow":
        """What one forward pass over rows `first_row:` and these columns reads and writes."""
        return KVWindow(self._layers, slice(first_row, len(self.starts)), columns, valid)


class KVWindow:
    """The cache object a transformers model sees: writes the new tokens' columns, returns all columns up to them."""

    def __init__(self, layers: list[Tensor], rows: slice, columns: slice, valid: Tensor) -> None:
        self._layers = layers
        self._rows = rows
        self._columns = columns
        self._valid = None if bool(valid.all()) else valid[:, None, :, None]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        layer = self._layers[layer_idx][:, self._rows]
        for known, new in zip(layer, (keys, values), strict=True):
            target = known[:, :, self._columns]
            # Padded positions of a short prompt overlap the known beginning of its row, which must stay.
            target.copy_(new if self._valid is None else torch.where(self._valid, new, target))
        seen = layer[:, :, :, : self._columns.stop]
        return seen[0], seen[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._columns.start


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **unused: Any
) -> tuple[Tensor, None]:
    """Attention for transformers models that never copies keys and values for grouped queries while decoding.

    The query heads that share a key head become that head's query positions.
    """
    batch, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    if length == 1:
        out = scaled_dot_product_attention(
            query.reshape(batch, -1, groups, dim), key, value, attn_mask=attention_mask, scale=scaling
        )
    else:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, heads, length, -1).transpose(1, 2).contiguous(), None


@dataclass(frozen=True, slots=True)
class Prefix:
    """The known beginning of a prompt."""

    length: int
    layers: list[Tensor]


class PrefixCache:
    """Keys and values of recent sequences, oldest forgotten first. A new prompt takes its longest known beginning."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[bytes, list[Tensor]] = OrderedDict()

    @property
    def enabled(self) -> bool:
        return self._max_bytes > 0

    def put(self, ids: IntArray, layers: list[Tensor]) -> None:
        self._forget(ids.tobytes())
        self._known[ids.tobytes()] = layers
        self._bytes += _num_bytes(layers)
        while self._bytes > self._max_bytes:
            self._forget(next(iter(self._known)))

    def _forget(self, key: bytes) -> None:
        if (layers := self._known.pop(key, None)) is not None:
            self._bytes -= _num_bytes(layers)

    def find(self, ids: IntArray) -> Prefix | None:
        """The longest beginning of `ids` whose keys and values are known; never all of it: one token must be run."""
        best, best_length = None, 0
        for key in self._known:
            length = common_prefix(np.frombuffer(key, dtype=np.int32), ids[:-1])
            if length > best_length:
                best, best_length = key, length
        if best is None:
            return None
        self._known.move_to_end(best)
        return Prefix(best_length, self._known[best])

    def clear(self) -> None:
        self._known.clear()
        self._bytes = 0


def _num_bytes(layers: list[Tensor]) -> int:
    return sum(layer.numel() * layer.element_size() for layer in layers)
