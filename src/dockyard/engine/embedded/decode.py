"""Sample one more token for many sequences, with as little host work per step as possible.

A step is a function of one small tensor. On a GPU it is captured as a CUDA graph for each of a few batch sizes and
replayed with new contents; unused rows write to a scratch region. Each request draws from its own random numbers.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dockyard.engine.embedded.kv import SCRATCH, KVShape
from dockyard.engine.embedded.model import Packed, fused

_BLOCK = 512
"""Tokens in a block. Blocks are summed first, and only one block per row is searched token by token."""


def sample(logits_BV: Tensor, temperatures: list[float], draws: list[float]) -> tuple[list[int], list[float]]:
    """Sample one token per row by inverting its cumulative distribution at a number in [0, 1).

    Returns the tokens and their logprobs under the distribution they were drawn from, which is certain (0) for
    temperature 0.
    """
    both_2B = torch.tensor([temperatures, draws], dtype=torch.float64).to(logits_BV.device)
    ids_B, logprobs_B = draw(logits_BV, both_2B[0], both_2B[1])
    return ids_B.tolist(), logprobs_B.tolist()


def draw(logits_BV: Tensor, temperatures_B: Tensor, draws_B: Tensor) -> tuple[Tensor, Tensor]:
    """`sample` on the device, with random numbers in float64."""
    greedy_B = temperatures_B == 0
    scale_B1 = torch.where(greedy_B, 1.0, temperatures_B).float()[:, None]
    logprobs_BV = torch.log_softmax(logits_BV.float() / scale_B1, dim=-1)
    drawn_B = _invert(logprobs_BV.exp(), draws_B)
    ids_B = torch.where(greedy_B, logits_BV.argmax(-1), drawn_B)
    return ids_B, logprobs_BV.gather(1, ids_B[:, None])[:, 0].masked_fill(greedy_B, 0.0)


def _invert(probabilities_BV: Tensor, draws_B: Tensor) -> Tensor:
    """The token at which each row's cumulative probability exceeds its random number."""
    size = probabilities_BV.shape[1]
    blocks_BNK = pad(probabilities_BV, (0, -size % _BLOCK)).unflatten(1, (-1, _BLOCK))
    sums_BN = blocks_BNK.sum(-1, dtype=torch.float64)
    block_B1, share_B1 = _find(sums_BN, draws_B[:, None])
    inside_BK = blocks_BNK.gather(1, block_B1[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    token_B1, _ = _find(inside_BK.double(), share_B1)
    return (block_B1 * _BLOCK + token_B1)[:, 0]


def _find(weights_BN: Tensor, draws_B1: Tensor) -> tuple[Tensor, Tensor]:
    """The weight that each number in [0, 1) falls on, never one that is 0, and the position inside it in [0, 1)."""
    ends_BN = weights_BN.cumsum(-1)
    target_B1 = draws_B1 * ends_BN[:, -1:]
    last_B1 = (ends_BN < ends_BN[:, -1:]).sum(-1, keepdim=True)  # the last that is not 0, which rounding may exceed
    found_B1 = torch.searchsorted(ends_BN, target_B1, right=True).minimum(last_B1)
    weight_B1 = weights_BN.gather(1, found_B1)
    begins_B1 = ends_BN.gather(1, found_B1) - weight_B1
    return found_B1, ((target_B1 - begins_B1) / weight_B1).clamp(0, 1)


logger = logging.getLogger(__name__)
Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Next:
    """A sequence that gets one more token."""

    token_id: int
    """Its last token so far, which this step computes."""
    start: int
    """Its start in the pool."""
    length: int
    """Its length including that token."""
    temperature: float
    draw: float
    """A random number in [0, 1)."""


_PADDING = Next(token_id=0, start=SCRATCH.start, length=1, temperature=1.0, draw=0.0)


class PackedModel(Protocol):
    """Computes packed tokens and writes their keys and values to the pool."""

    def logits(self, packed: Packed) -> Tensor: ...


class Recorder(Protocol):
    """Records work so that it can be repeated, faster if possible."""

    def __call__(self, work: Work) -> Work: ...


class Unrecorded:
    """Records nothing, for CPUs."""

    def __call__(self, work: Work) -> Work:
        return work


class CudaGraphs:
    """Records work as CUDA graphs, which share the memory of intermediate results."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._works = True

    def __call__(self, work: Work) -> Work:
        for _ in range(2):  # lazy initialisation must happen before; repeating a step is harmless
            work()
        if not self._works:
            return work
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            # Other threads, such as the trainer's, may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:  # the model synchronises with the GPU, as some mixtures do
            self._works = False
            logger.warning("decoding without CUDA graphs, which this model does not allow: %s", str(error)[:200])
            return work
        return graph.replay


class _Step:
    """The buffers of one batch size: the tensor that is filled, and the one that is read."""

    def __init__(self, model: PackedModel, size: int, max_length: int, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._limits = torch.tensor([1, max_length, 0])
        self._inputs_5B = torch.zeros((5, size), dtype=torch.float64, device=device)
        self._outputs_2B = torch.zeros((2, size), dtype=torch.float64, device=device)
        self.fill([])

    def fill(self, rows: Sequence[Next], num_shared: int = 0) -> None:
        self._limits[2] = num_shared
        rows = [*rows, *[_PADDING] * (self._inputs_5B.shape[1] - len(rows))]
        columns = [(row.token_id, row.start, row.length, row.temperature, row.draw) for row in rows]
        self._inputs_5B.copy_(torch.from_numpy(np.array(columns, dtype=np.float64).T))

    def work(self) -> None:
        tokens_B, starts_B, lengths_B = self._inputs_5B[:3].long()
        positions_B = lengths_B - 1
        bounds_R = torch.arange(len(tokens_B) + 1, device=self._device)
        rest_2R = torch.nn.functional.pad(self._inputs_5B[1:3].int(), (0, 1))
        rows_3R = torch.cat([bounds_R[None].int(), rest_2R])
        packed = Packed(tokens_B[None], positions_B[None], starts_B + positions_B, rows_3R, self._limits)
        ids_B, logprobs_B = draw(self._model.logits(packed), self._inputs_5B[3], self._inputs_5B[4])
        self._outputs_2B[0] = ids_B
        self._outputs_2B[1] = logprobs_B

    def read(self, num: int) -> tuple[list[int], list[float]]:
        ids, logprobs = self._outputs_2B[:, :num].tolist()
        return [int(token_id) for token_id in ids], logprobs


class Steps:
    """Decodes. Each batch size is recorded when it is first used."""

    def __init__(
        self,
        model: PackedModel,
        device: torch.device,
        recorder: Callable[[], Recorder],
        *,
        sizes: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """`sizes` of batches and `lengths` of sequences are those to record, in ascending order."""
        self._model = model
        self._device = device
        self._recorder = recorder
        self._record = recorder()
        self._sizes = sizes
        self._lengths = lengths
        self._steps: dict[tuple[int, int], tuple[_Step, Work]] = {}

    def run(self, rows: Sequence[Next], num_shared: int = 0) -> tuple[list[int], list[float]]:
        """The next token of each sequence and its logprob. All sequences share their first `num_shared` tokens."""
        size = _at_least(len(rows), self._sizes)
        length = _at_least(max(row.length for row in rows), self._lengths)
        if (size, length) not in self._steps:
            step = _Step(self._model, size, length, self._device)
            self._steps[size, length] = step, self._record(step.work)
        step, again = self._steps[size, length]
        step.fill(rows, num_shared)
        again()
        return step.read(len(rows))

    def forget(self) -> None:
        """Discard recordings, after the pool or the weights have moved in memory."""
        self._steps.clear()
        self._record = self._recorder()  # frees the memory that recordings share


def _at_least(wanted: int, choices: Sequence[int]) -> int:
    return choices[bisect_left(choices, wanted)]


def steps_for(model: PackedModel, shape: KVShape, max_batch: int, max_length: int) -> Steps:
    """The steps for the device of the pool."""
    if shape.device.type != "cuda":
        sizes = range(1, max_batch + 1)
        return Steps(model, shape.device, Unrecorded, sizes=sizes, lengths=[max_length])
    # The fused kernel only partitions its work by the longest length; others compute all of that length.
    first, factor = (1024, 4) if fused(shape.device, shape.dtype, shape.head_dim) else (256, 2)
    lengths = few_lengths(max_length, first=first, factor=factor)
    return Steps(model, shape.device, CudaGraphs, sizes=few_sizes(max_batch), lengths=lengths)


def few_sizes(most: int) -> list[int]:
    """Batch sizes that are worth recording."""
    sizes = [2, 4, 8, 16, 24, 32, 48, 64, 96, 128, *range(192, most, 64)]
    return [*(size for size in sizes if size < most), max(2, most)]


def few_lengths(most: int, *, first: int, factor: int) -> list[int]:
    lengths = [first]
    while lengths[-1] < most:
        lengths.append(lengths[-1] * factor)
    return lengths
