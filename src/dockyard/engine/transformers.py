"""The embedded engine: a transformers model decoded in a thread of this process, on a CPU or one GPU.

Requests join and leave the batch at every token. New weights take effect between two tokens: everything computed
under the old ones is thrown away, and requests in flight run their tokens so far through the new weights.
"""

import asyncio
import random
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from dockyard.config import EngineConfig
from dockyard.engine import ContextOverflow, GenerateRequest, Generation
from dockyard.engine.kv import KVRows, KVShape, Prefix, PrefixCache, grouped_attention
from dockyard.engine.weights import load_adapter
from dockyard.errors import EngineError
from dockyard.sequences import common_prefix
from dockyard.types import Finish, IntArray

_PREFILL_COLUMNS = 2048  # longer prompts are run in pieces, so that their attention mask stays small
_PREFILL_TOKENS = 8192  # positions in one prefill pass, padding included
_WORTH_WAITING = 16  # tokens two waiting prompts must share before one waits for the other's keys and values


@dataclass(slots=True, eq=False)
class _Row:
    """One request on its way."""

    request: GenerateRequest
    future: "Future[Generation]"
    random: random.Random
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])

    @property
    def context(self) -> IntArray:
        return np.concatenate([self.request.prompt_ids, np.array(self.token_ids, dtype=np.int32)])

    @property
    def finish(self) -> Finish | None:
        if self.token_ids and self.token_ids[-1] in self.request.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if len(self.token_ids) == self.request.max_new_tokens else None

    def generation(self, finish: Finish) -> Generation:
        return Generation(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            finish=finish,
        )


@dataclass(frozen=True, slots=True)
class _Publish:
    adapter_dir: Path
    version: int
    done: "Future[None]"


class _Close:
    """Ends the engine's thread."""


class TransformersEngine:
    """Implements `Engine` over a causal language model of transformers, with or without a PEFT adapter.

    It has one version of the weights: a request that is under way when another is published goes on with that.
    """

    def __init__(self, model: Any, config: EngineConfig, version: int = 0) -> None:
        text = model.config.get_text_config()
        _refuse_unknown_attention(text)
        AttentionInterface.register("dockyard", grouped_attention)
        model.set_attn_implementation("dockyard")
        self._model = model.eval()
        self._version = version
        self._context_length = min(config.context_length or text.max_position_embeddings, text.max_position_embeddings)
        self._max_batch = 1 if config.deterministic else config.max_batch
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self._shape = KVShape(text.num_hidden_layers, text.num_key_value_heads, head_dim, model.device, model.dtype)
        self._prefixes = PrefixCache(0 if config.deterministic else config.prefix_cache_mb * 2**20)
        self._inbox: SimpleQueue[_Row | _Publish | _Close] = SimpleQueue()
        self._waiting: list[_Row] = []
        self._rows: list[_Row] = []
        self._kv = KVRows(self._shape)
        self._death: EngineError | None = None
        self._thread = threading.Thread(target=self._serve, name="dockyard-engine", daemon=True)
        self._thread.start()

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def version(self) -> int:
        return self._version

    @property
    def down_s(self) -> float:
        return 0.0

    async def generate(self, request: GenerateRequest) -> Generation | ContextOverflow:
        room = self._context_length - len(request.prompt_ids)
        if room < 1:
            return ContextOverflow(prompt_tokens=len(request.prompt_ids), context_length=self._context_length)
        clamped = GenerateRequest(
            prompt_ids=request.prompt_ids.astype(np.int32),
            max_new_tokens=min(request.max_new_tokens, room),
            temperature=request.temperature,
            stop_ids=request.stop_ids,
            seed=request.seed,
        )
        row = _Row(clamped, Future(), random.Random(request.seed))
        self._send(row)
        return await asyncio.wrap_future(row.future)

    async def publish(self, adapter_dir: Path, version: int) -> None:
        done: Future[None] = Future()
        self._send(_Publish(adapter_dir, version, done))
        await asyncio.wrap_future(done)

    async def close(self) -> None:
        self._inbox.put(_Close())
        await asyncio.to_thread(self._thread.join)

    def _send(self, message: "_Row | _Publish") -> None:
        self._inbox.put(message)
        # Only now: whoever died before this line is seen here, and whoever dies after it answers what is in the inbox.
        if self._death is not None:
            raise self._death

    # The engine's thread.

    def _serve(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_messages():
                    self._drop_cancelled()
                    self._admit()
                    self._decode()
        except Exception as error:  # whatever stopped the thread must reach those who wait for it
            death = EngineError(f"the embedded engine stopped: {error!r}", hint="run again with --debug")
            death.__cause__ = error
            self._die(death)
        else:
            self._die(EngineError("the embedded engine was closed", hint="start it again"))

    def _die(self, error: EngineError) -> None:
        self._death = error
        pending: list[_Row | _Publish | _Close] = [*self._rows, *self._waiting]
        while True:
            try:
                pending.append(self._inbox.get_nowait())
            except Empty:
                break
        for item in pending:
            future = item.future if isinstance(item, _Row) else item.done if isinstance(item, _Publish) else None
            if future is not None and _is_awaited(future):
                future.set_exception(error)

    def _take_messages(self) -> bool:
        """Read the inbox, waiting only when there is nothing to decode. False when the engine is to end."""
        block = not self._rows and not self._waiting
        while True:
            try:
                message = self._inbox.get(block=block)
            except Empty:
                return True
            if isinstance(message, _Close):
                return False
            if isinstance(message, _Publish):
                self._load(message)
            else:
                self._waiting.append(message)
            block = False

    def _load(self, message: _Publish) -> None:
        self._prefixes.clear()
        self._waiting = [*self._rows, *self._waiting]
        self._rows, self._kv = [], KVRows(self._shape)
        try:
            self._model = load_adapter(self._model, message.adapter_dir)
        except Exception as error:  # the caller of publish is told; the old weights stay
            if _is_awaited(message.done):
                message.done.set_exception(error)
            return
        self._version = message.version
        if _is_awaited(message.done):
            message.done.set_result(None)

    def _drop_cancelled(self) -> None:
        self._waiting = [row for row in self._waiting if not row.future.cancelled()]
        for index in reversed(range(len(self._rows))):
            if self._rows[index].future.cancelled():
                self._remove(index)

    def _remove(self, index: int) -> None:
        self._kv.remove(index)
        last = self._rows.pop()
        if index < len(self._rows):
            self._rows[index] = last

    def _admit(self) -> None:
        """Run the prompts of waiting requests, as many as fit."""
        if self._waiting and not self._rows:
            self._kv = KVRows(self._shape)  # or where rows stood before would show in the last digits
        while self._waiting and len(self._rows) < self._max_batch:
            self._prefill(*self._choose())

    def _choose(self) -> tuple[list[_Row], list[Prefix | None]]:
        """Which waiting requests to run next: prompts that begin alike wait for the first of them."""
        chosen: list[_Row] = []
        prefixes: list[Prefix | None] = []
        widest = 0
        for row in self._waiting:
            context = row.context
            prefix = self._prefixes.find(context)
            known = prefix.length if prefix else 0
            shared = max((common_prefix(other.context, context[:-1]) for other in chosen), default=0)
            if self._prefixes.enabled and shared > known + _WORTH_WAITING:
                continue
            widest = max(widest, len(context) - known)
            full = len(self._rows) + len(chosen) >= self._max_batch or widest * (len(chosen) + 1) > _PREFILL_TOKENS
            if chosen and full:
                break
            chosen.append(row)
            prefixes.append(prefix)
        self._waiting = [row for row in self._waiting if row not in chosen]
        return chosen, prefixes

    def _prefill(self, rows: list[_Row], prefixes: list[Prefix | None]) -> None:
        contexts = [row.context for row in rows]
        known = [prefix.length if prefix else 0 for prefix in prefixes]
        width = max(len(context) - skip for context, skip in zip(contexts, known, strict=True))
        ids = np.zeros((len(rows), width), dtype=np.int64)
        valid = np.zeros((len(rows), width), dtype=np.bool_)
        for index, (context, skip) in enumerate(zip(contexts, known, strict=True)):
            ids[index, width - (len(context) - skip) :] = context[skip:]
            valid[index, width - (len(context) - skip) :] = True
        first_row = len(self._rows)
        self._kv.add([len(context) for context in contexts], prefixes)
        self._rows += rows
        logits = self._run(first_row, ids, valid)
        for index, (context, skip) in enumerate(zip(contexts, known, strict=True)):
            if self._prefixes.enabled and skip < len(context) - 1:
                self._prefixes.put(context, self._kv.extract(first_row + index))
        self._sample(first_row, logits)

    def _decode(self) -> None:
        if not self._rows:
            return
        self._kv.grow()
        ids = np.array([[row.token_ids[-1]] for row in self._rows], dtype=np.int64)
        self._sample(0, self._run(0, ids, np.ones_like(ids, dtype=np.bool_)))

    def _run(self, first_row: int, ids: np.ndarray, valid: np.ndarray) -> Tensor:
        """The last column's logits of the rows from `first_row` on, whose last columns hold these tokens."""
        device = self._shape.device
        ids_BT, valid_BT = torch.from_numpy(ids).to(device), torch.from_numpy(valid).to(device)
        starts_B1 = torch.tensor(self._kv.starts[first_row:], device=device)[:, None]
        width, end = ids.shape[1], self._kv.end
        logits = torch.empty(0)
        for left in range(0, width, _PREFILL_COLUMNS):
            part = slice(left, min(left + _PREFILL_COLUMNS, width))
            columns = slice(end - width + part.start, end - width + part.stop)
            queries_T = torch.arange(columns.start, columns.stop, device=device)
            keys_S = torch.arange(columns.stop, device=device)
            causal_TS = keys_S <= queries_T[:, None]
            own_TS = keys_S == queries_T[:, None]  # a padded position sees itself, or its softmax would be NaN
            mask_BTS = (causal_TS & (keys_S >= starts_B1[:, :, None])) | own_TS
            window = self._kv.window(first_row, columns, valid_BT[:, part])
            logits = self._model(
                input_ids=ids_BT[:, part],
                attention_mask=mask_BTS[:, None],
                position_ids=(queries_T - starts_B1).clamp(min=0),
                past_key_values=window,
                use_cache=True,
                logits_to_keep=1,
            ).logits
        return logits[:, -1].float()

    def _sample(self, first_row: int, logits_BV: Tensor) -> None:
        rows = self._rows[first_row:]
        draws = [row.random.random() for row in rows]
        token_ids, logprobs = sample(logits_BV, [row.request.temperature for row in rows], draws)
        for row, token_id, logprob in zip(rows, token_ids, logprobs, strict=True):
            row.token_ids.append(token_id)
            row.logprobs.append(logprob)
            row.versions.append(self._version)
        for index in reversed(range(first_row, len(self._rows))):
            row = self._rows[index]
            if (finish := row.finish) is not None:
                self._finish(index, row, finish)

    def _finish(self, index: int, row: _Row, finish: Finish) -> None:
        if self._prefixes.enabled:
            # The last token was sampled but never run, so its keys and values are not there.
            self._prefixes.put(row.context[:-1], self._kv.extract(index))
        self._remove(index)
        if _is_awaited(row.future):
            row.future.set_result(row.generation(finish))


def _is_awaited(future: "Future[Any]") -> bool:
    """Whether to answer. From here on it can no longer be cancelled, which would break the answering thread."""
    return future.set_running_or_notify_cancel()


def sample(logits_BV: Tensor, temperatures: list[float], draws: list[float]) -> tuple[list[int], list[float]]:
    """Draw one token a row by inverting its cumulative distribution at a number in [0, 1).

    Returns the tokens and their logprobs under the distribution they were drawn from, which is certain (0) for
    temperature 0.
    """
    greedy_B = torch.tensor([temperature == 0 for temperature in temperatures], device=logits_BV.device)
    scale_B1 = torch.tensor([[temperature or 1.0] for temperature in temperatures], device=logits_BV.device)
    logprobs_BV = torch.log_softmax(logits_BV / scale_B1, dim=-1)
    cumulative_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    draws_B1 = torch.tensor(draws, dtype=torch.float64, device=logits_BV.device)[:, None]
    drawn_B1 = torch.searchsorted(cumulative_BV, draws_B1 * cumulative_BV[:, -1:], right=True)
    ids_B1 = torch.where(
        greedy_B[:, None], logits_BV.argmax(-1, keepdim=True), drawn_B1.clamp(max=logits_BV.shape[1] - 1)
    )
    logprobs_B = logprobs_BV.gather(1, ids_B1)[:, 0].masked_fill(greedy_B, 0.0)
    return ids_B1[:, 0].tolist(), logprobs_B.tolist()


def _refuse_unknown_attention(text_config: Any) -> None:
    kinds = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    if getattr(text_config, "layer_types", None) is None and getattr(text_config, "sliding_window", None):
        kinds = {"sliding_attention"}
    if not hasattr(text_config, "num_key_value_heads"):
        kinds = {"another layout of attention heads"}
    if kinds != {"full_attention"}:
        raise EngineError(
            f"the embedded engine runs full attention only; `{text_config.model_type}` has {', '.join(sorted(kinds))}",
            hint="choose a model without sliding or linear attention layers",
        )
