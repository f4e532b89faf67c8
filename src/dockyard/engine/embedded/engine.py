"""The embedded engine: a transformers model decoded in a thread of this process, on a CPU or one GPU.

Requests join and leave the batch at every token. New weights take effect between two tokens: everything computed
under the old weights is discarded, and requests in progress recompute their tokens so far with the new ones.
"""

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from dockyard.config import EngineConfig
from dockyard.engine.embedded.decode import steps_for
from dockyard.engine.embedded.kv import KVPool, KVShape, pool_size
from dockyard.engine.embedded.model import PooledModel
from dockyard.engine.embedded.scheduler import Counts, DecodeRequest, Scheduler
from dockyard.engine.protocol import ContextOverflow, GenerateRequest, Generation
from dockyard.engine.weights import load_weights, other_attention
from dockyard.errors import EngineError


@dataclass(frozen=True, slots=True)
class _Publish:
    folder: Path
    version: int
    done: "Future[None]"


class _Close:
    """Ends the engine's thread."""


class TransformersEngine:
    """Implements `Engine` over a causal language model of transformers, with or without a PEFT adapter.

    It has one version of the weights: a request in progress continues with a new version once that is published.
    """

    def __init__(self, model: Any, config: EngineConfig, version: int = 0) -> None:
        text = model.config.get_text_config()
        _refuse_unknown_attention(text)
        self._version = version
        shape = _kv_shape(model, text)
        size = pool_size(shape, config)
        self._context_length = _context_length(config, text.max_position_embeddings, size.longest)
        max_batch = 1 if config.deterministic else config.max_batch
        self._model = PooledModel(model.eval(), KVPool(shape, size))
        steps = steps_for(self._model, shape, max_batch, self._context_length)
        self._batch = Scheduler(self._model, steps, max_batch, version, shares=size.finished > 0)
        self._stream = _own_stream(shape.device)
        self._inbox: SimpleQueue[DecodeRequest | _Publish | _Close] = SimpleQueue()
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

    @property
    def counts(self) -> Counts:
        """Counts of its work so far."""
        return self._batch.counts

    async def generate(self, request: GenerateRequest) -> Generation | ContextOverflow:
        room = self._context_length - len(request.prompt_ids)
        if room < 1:
            return ContextOverflow(prompt_tokens=len(request.prompt_ids), context_length=self._context_length)
        row = DecodeRequest(request, max(1, min(request.max_new_tokens, room)))
        self._send(row)
        return await asyncio.wrap_future(row.future)

    async def publish(self, adapter_dir: Path, version: int) -> None:
        done: Future[None] = Future()
        self._send(_Publish(adapter_dir, version, done))
        await asyncio.wrap_future(done)

    async def close(self) -> None:
        self._inbox.put(_Close())
        await asyncio.to_thread(self._thread.join)

    def _send(self, message: "DecodeRequest | _Publish") -> None:
        self._inbox.put(message)
        # Checked after putting: a thread that died before is seen here, and one that dies later answers its inbox.
        if self._death is not None:
            raise self._death

    # The engine's thread.

    def _serve(self) -> None:
        try:
            # On its own stream: on the default one each token would wait for the work that the trainer has queued.
            with torch.no_grad(), torch.cuda.stream(self._stream):
                while self._take_messages():
                    self._batch.advance()
        except Exception as error:  # whatever stopped the thread is raised in waiting calls
            death = EngineError(f"the embedded engine stopped: {error!r}", hint="run again with --debug")
            death.__cause__ = error
            self._die(death)
        else:
            self._die(EngineError("the embedded engine was closed", hint="start it again"))

    def _die(self, error: EngineError) -> None:
        self._death = error
        self._batch.fail(error)
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            if isinstance(message, DecodeRequest):
                message.fail(error)
            elif isinstance(message, _Publish) and message.done.set_running_or_notify_cancel():
                message.done.set_exception(error)

    def _take_messages(self) -> bool:
        """Read the inbox, waiting only if there is nothing to decode. Returns False if the engine should end."""
        block = self._batch.idle
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
                self._batch.add(message)
            block = False

    def _load(self, message: _Publish) -> None:
        awaited = message.done.set_running_or_notify_cancel()  # after this it cannot be cancelled
        try:
            model = load_weights(self._model.model, message.folder)
        except Exception as error:  # raised in the caller of `publish`; the old weights stay
            self._batch.start_over(self._model.model, self._version)
            if awaited:
                message.done.set_exception(error)
            return
        self._version = message.version
        self._batch.start_over(model, message.version)
        if awaited:
            message.done.set_result(None)


def _context_length(config: EngineConfig, model_length: int, pool_length: int) -> int:
    wanted = min(config.context_length or model_length, model_length)
    if config.context_length is not None and pool_length < wanted:
        raise EngineError(
            f"`engine.context_length` is {wanted:,} tokens, and there is memory for keys and values of {pool_length:,}",
            hint=f"`--engine.context_length {pool_length}`, or give it more memory with `--engine.kv_cache_gb`",
        )
    return min(wanted, pool_length)


def _own_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A new stream that waits until the weights are ready."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _kv_shape(model: Any, text: Any) -> KVShape:
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return KVShape(text.num_hidden_layers, text.num_key_value_heads, head_dim, model.device, model.dtype)


def _refuse_unknown_attention(text_config: Any) -> None:
    kinds = other_attention(text_config)
    if not hasattr(text_config, "num_key_value_heads"):
        kinds = ["another layout of attention heads"]
    if kinds:
        raise EngineError(
            f"the embedded engine runs full attention only; `{text_config.model_type}` has {', '.join(kinds)}",
            hint="choose a model without sliding or linear attention layers",
        )
