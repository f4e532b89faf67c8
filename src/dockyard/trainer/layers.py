"""Activation checkpointing: decoder layers, compiled on a GPU, keep as many activations as memory allows.

A layer that keeps all activations is fastest. One that keeps fewer recomputes the rest, and one that keeps none runs
twice. The memory of each level is measured on the first layer when it is first needed. If even the backward pass of a
single layer does not fit, its feed-forward part runs on chunks of tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from enum import IntEnum
from functools import partial
from itertools import count, pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dockyard.engine.torch_internals import activation_budget, mark_dynamic, original_call, replace_call
from dockyard.trainer.attention import RowLayout, in_layer
from dockyard.trainer.memory import free_bytes


class Keep(IntEnum):
    """What a layer keeps for the backward pass."""

    OFFLOADED = 0
    """As `NOTHING`, with its inputs offloaded to host memory."""
    NOTHING = 1
    ATTENTION = 2
    PRODUCTS = 3
    """Matrix products; what lies between them is cheap to recompute."""
    EVERYTHING = 4


_BUDGETS = {Keep.ATTENTION: 0.15, Keep.PRODUCTS: 0.68, Keep.EVERYTHING: 1.0}
"""The share of a layer's activations that the compiler may keep. At 0.15 it still does not recompute attention."""
_BACKWARD = 2.8
"""The memory of one layer's backward pass, in multiples of what a layer that keeps everything keeps."""
_SPARE_BYTES = 2 * 2**30
_MEASURED_TOKENS = 4096
_PART_TOKENS = 4096
"""Tokens in a chunk of the feed-forward part when memory is short."""


def _compiled() -> Callable[..., Any]:
    """A new function each time, because the compiler caches its results by the function's code."""

    def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return original_call(layer)(*args, **kwargs)

    code = run.__code__.replace(co_name=f"run_{next(_NUMBERS)}")
    return torch.compile(FunctionType(code, run.__globals__, code.co_name))


_NUMBERS = count()


class Layers:
    """Replaces how a model's decoder layers are called. Copies of the model are not affected."""

    def __init__(
        self, layers: Sequence[Any], *, compiled: bool, levels: list[Keep], head_bytes: int, gradient_bytes: int
    ) -> None:
        """`levels` are those to choose from. The memory of head and gradients is left free."""
        self.reserved_tokens = 0
        """The tokens of a later pass, for which memory is left besides what this pass keeps."""
        self._num = len(layers)
        self._compiled = compiled
        self._levels = levels
        self._head_bytes = head_bytes
        self._gradient_bytes = gradient_bytes
        self._lost_bytes = 0
        """Memory that was reported as free but could not be allocated."""
        self._per_token: dict[Keep, float] = {}
        self._plan: list[Keep] = []
        self._in_parts = False
        self._runs = {keep: _compiled() for keep in _BUDGETS}
        self._without_gradients = _compiled()
        for index, layer in enumerate(layers):
            replace_call(layer, partial(self._call, index, layer))

    def be_careful(self) -> None:
        """Keep less from now on, after running out of memory."""
        self._lost_bytes += torch.cuda.mem_get_info()[1] // 8
        self._per_token.clear()  # to be measured again

    def _call(self, index: int, layer: Any, hidden_1TD: Tensor, *args: Any, **kwargs: Any) -> Any:
        if "row_call" in kwargs:
            kwargs["row_call"] = in_layer(kwargs["row_call"], index)
        if self._compiled:
            _mark_lengths((hidden_1TD, *args, *kwargs.values()), hidden_1TD.shape[1])
        if not torch.is_grad_enabled():
            run = partial(self._without_gradients, layer) if self._compiled else original_call(layer)
            return run(hidden_1TD, *args, **kwargs)
        if index == 0:
            self._plan = self._choose(layer, hidden_1TD, args, kwargs)
        return self._run(self._plan[index], layer, hidden_1TD, *args, **kwargs)

    def _run(self, keep: Keep, layer: Any, *args: Any, **kwargs: Any) -> Any:
        level = max(keep, Keep.ATTENTION)
        run = partial(self._runs[level], layer) if self._compiled else original_call(layer)
        if self._in_parts and _has_parts(layer):
            run = partial(_run_in_parts, layer)
        with activation_budget(_BUDGETS[level]):
            if keep > Keep.NOTHING:
                return run(*args, **kwargs)
            with save_on_cpu(pin_memory=True) if keep is Keep.OFFLOADED else nullcontext():
                return checkpoint(run, *args, use_reentrant=False, **kwargs)

    def _choose(self, layer: Any, hidden_1TD: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Keep]:
        """Choose what each layer keeps. Levels that are not needed are neither measured nor compiled."""
        num_tokens = hidden_1TD.shape[1]
        sizes: dict[Keep, float] = {}
        chosen: list[Keep] = []
        self._in_parts = False  # while measuring
        in_parts = False
        for keep in self._levels:
            if keep not in self._per_token:
                self._per_token[keep] = self._measure(keep, layer, hidden_1TD, args, kwargs)
            sizes[keep] = self._per_token[keep] * num_tokens
            later = self.reserved_tokens * self._per_token[Keep.EVERYTHING] * (self._num + _BACKWARD)
            needed = self._gradient_bytes + self._lost_bytes + _BACKWARD * sizes[Keep.EVERYTHING]
            left = free_bytes(hidden_1TD.device) - needed
            room = left - self._head_bytes - _SPARE_BYTES - later
            chosen = plan(sizes, self._num, room)
            total = sum(sizes[kept] for kept in chosen)
            in_parts = total > left  # the margin and later passes do not justify the slower way
            if total <= room:
                break
        self._in_parts = in_parts
        return chosen

    def _measure(
        self, keep: Keep, layer: Any, hidden_1TD: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> float:
        """The bytes per token that a level keeps, measured on the first tokens."""
        num, short = hidden_1TD.shape[1], min(hidden_1TD.shape[1], _MEASURED_TOKENS)
        some_args = [_shortened(value, num, short) for value in args]
        some_kwargs = {name: _shortened(value, num, short) for name, value in kwargs.items()}
        if "row_blocks" in kwargs:
            some_kwargs |= RowLayout.one_sequence(short).arguments
        if hidden_1TD.device.type == "cpu":
            some = _shortened(hidden_1TD, num, short).detach().requires_grad_()
            return _bytes_kept(layer, lambda: self._run(keep, layer, some, *some_args, **some_kwargs)) / short
        used = 0
        for _ in range(2):  # the first run also compiles and allocates other memory
            some = _shortened(hidden_1TD, num, short).detach().requires_grad_()
            if self._compiled:
                _mark_lengths((some, *some_args, *some_kwargs.values()), short)
            before = torch.cuda.memory_allocated()
            out = self._run(keep, layer, some, *some_args, **some_kwargs)
            used = torch.cuda.memory_allocated() - before
            del out
        if keep is Keep.OFFLOADED:  # a layer's output is the next one's input, which is offloaded
            used -= _shortened(hidden_1TD, num, short).nbytes
        return used / short


def _has_parts(layer: Any) -> bool:
    """Whether the feed-forward part is a plain one that treats tokens independently."""
    return isinstance(getattr(getattr(layer, "mlp", None), "down_proj", None), nn.Module)


def _run_in_parts(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the feed-forward part, which has the widest tensors, on chunks of tokens, forward and backward."""
    part = layer.mlp

    def in_parts(hidden_1TD: Tensor) -> Tensor:
        run = original_call(part)
        made = [checkpoint(run, some, use_reentrant=False) for some in hidden_1TD.split(_PART_TOKENS, 1)]
        return torch.cat(made, dim=1)

    replace_call(part, in_parts)
    try:
        return original_call(layer)(*args, **kwargs)
    finally:
        replace_call(part, None)


def _shortened(value: Any, num: int, short: int) -> Any:
    """The part of an argument that belongs to the first tokens."""
    if isinstance(value, tuple):
        return tuple(_shortened(item, num, short) for item in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == num:
        return value[:, :short].contiguous()
    return value


def plan(sizes: dict[Keep, float], num_layers: int, room: float) -> list[Keep]:
    """What each layer keeps so that the total fits into `room`, lowering one layer after the other by one level.

    The last layers keep most, because what they keep is needed first and then freed.
    """
    levels = list(sizes)
    chosen = [levels[0]] * num_layers
    total = num_layers * sizes[levels[0]]
    for more, less in pairwise(levels):
        for index in range(num_layers):
            if total <= room:
                return chosen
            chosen[index] = less
            total -= sizes[more] - sizes[less]
    return chosen


def _bytes_kept(layer: Any, run: Callable[[], Any]) -> int:
    """The bytes that a run of a layer saves for the backward pass, without its weights; shared memory counts once."""
    weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    pieces: dict[int, int] = {}

    def note(kept: Tensor) -> Tensor:
        memory = kept.untyped_storage()
        pieces[memory.data_ptr()] = memory.nbytes()
        return kept

    with saved_tensors_hooks(note, lambda kept: kept):
        out = run()
    del out  # nothing was freed before, so no address repeats
    return sum(size for address, size in pieces.items() if address not in weights)


def _mark_lengths(values: Iterable[Any], num_tokens: int) -> None:
    """Tell the compiler which sizes differ from call to call; otherwise it would compile for each."""
    for value in values:
        if isinstance(value, tuple):  # the rotary embeddings of positions
            _mark_lengths(value, num_tokens)
        elif isinstance(value, Tensor) and value.ndim > 1:
            if value.shape[1] == num_tokens:
                mark_dynamic(value, 1)
            elif value.device.type == "cpu":  # `row_blocks`
                mark_dynamic(value, 0)
