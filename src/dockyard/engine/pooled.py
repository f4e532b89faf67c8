"""A causal language model whose layers keep their keys and values in a pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor

from dockyard.engine import attention
from dockyard.engine.attention import Packed
from dockyard.engine.kv import SCRATCH, Pool
from dockyard.engine.packed import pack_linears, worth_packing
from dockyard.engine.weights import worth_compiling
from dockyard.types import IntArray


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence that are run together."""

    token_ids: IntArray
    num_known: int
    """Tokens before them, whose keys and values are in the pool."""
    start: int
    """Where the sequence begins in the pool."""


_NOBODY = Piece(np.zeros(1, np.int32), 0, SCRATCH.start)


def pack(pieces: Sequence[Piece], device: torch.device) -> Packed:
    """Pieces as one pass takes them."""
    if device.type == "cuda":
        pieces = [*pieces, _NOBODY]  # 1 is a size of its own for the compiler, so nothing is ever that small
    counts = [len(piece.token_ids) for piece in pieces]
    lengths = [piece.num_known + count for piece, count in zip(pieces, counts, strict=True)]
    starts = [piece.start for piece in pieces]
    positions = np.concatenate([np.arange(piece.num_known, end) for piece, end in zip(pieces, lengths, strict=True)])
    rows = np.array([[0, *np.cumsum(counts)], [*starts, 0], [*lengths, 0]], dtype=np.int32)
    token_ids = np.concatenate([piece.token_ids for piece in pieces]).astype(np.int64)
    return Packed(
        torch.from_numpy(token_ids).to(device)[None],
        torch.from_numpy(positions).to(device)[None],
        torch.from_numpy(positions + np.repeat(starts, counts)).to(device),
        torch.from_numpy(rows).to(device),
        torch.tensor([max(counts), max(lengths), 0]),
    )


def _run_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer._call_impl(*args, **kwargs)


class PooledModel:
    """Takes over how a model's decoder layers are called: each is given its layer of the pool."""

    def __init__(self, model: Any, pool: Pool) -> None:
        self.pool = pool
        self._packs = worth_packing(model)
        self._run_layer: Any = _run_layer
        self._compiled = worth_compiling(model)
        if self._compiled:
            self._run_layer = torch.compile(_run_layer)
        self.take_over(model)

    def take_over(self, model: Any) -> None:
        """From now on it is this model, with or without adapters, that is run."""
        _narrow_adapters(model)
        self.model = model
        causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        causal.set_attn_implementation(attention.NAME)
        self._causal = causal
        if self._packs:
            pack_linears(causal)
        for index, layer in enumerate(causal.get_decoder().layers):
            layer._compiled_call_impl = partial(self._call, index, layer)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of all weights."""
        return tuple(parameter.data_ptr() for parameter in self.model.parameters())

    def logits(self, packed: Packed, wanted_N: Tensor | None = None) -> Tensor:
        """Of these tokens of a pass, or of all; what was run is in the pool afterwards."""
        return self._causal(
            input_ids=packed.token_ids_1T,
            position_ids=packed.positions_1T,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=0 if wanted_N is None else wanted_N,
            slots=packed.slots_T,
            rows=packed.rows_3R,
            limits=packed.limits,
        ).logits[0]

    def _call(self, index: int, layer: Any, hidden_1TD: Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs["pool"] = self.pool.layers[index]
        if self._compiled:
            _mark_lengths(hidden_1TD, kwargs)
        return self._run_layer(layer, hidden_1TD, *args, **kwargs)


def _mark_lengths(hidden_1TD: Tensor, kwargs: dict[str, Any]) -> None:
    """Tell the compiler which sizes differ from call to call, or it would compile for each."""
    torch._dynamo.maybe_mark_dynamic(kwargs["slots"], 0)
    by_token = (hidden_1TD, kwargs.get("position_ids"), *(kwargs.get("position_embeddings") or ()))
    for value in (*by_token, kwargs["rows"], kwargs["pool"]):
        if value is not None:
            torch._dynamo.maybe_mark_dynamic(value, 1)


def _narrow_adapters(model: Any) -> None:
    """Adapters in the model's own number format: they are trained in a wider one, but multiplied in this."""
    for name, parameter in model.named_parameters():
        if "lora_" in name and parameter.dtype != model.dtype:
            parameter.data = parameter.data.to(model.dtype)
