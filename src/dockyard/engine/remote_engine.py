"""An engine over a model server. Servers differ in their wire format.

Each published adapter gets a new, unique name. Servers key their prefix caches by it, so the KV cache of older weights,
or of an earlier run, is never used again.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self
from uuid import uuid4

import numpy as np
from pydantic import ValidationError

from dockyard.engine.http import ModelServer, ServerResponse
from dockyard.engine.protocol import ContextOverflow, GenerateRequest, Generation
from dockyard.errors import DockyardError, EngineError
from dockyard.types import Finish

logger = logging.getLogger(__name__)

NO_LOGPROB = -9999.0  # what vLLM sends for NaN, which JSON does not have
_LOAD_TIMEOUT_S = 600.0
_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}
_MAX_CUTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request for one generation, with the model to sample from."""

    request: GenerateRequest
    model: str
    adapter: str | None = None
    """The name of a loaded adapter; None samples from the model as it is served."""
    top: int = 0
    """How many of the most likely tokens to return besides the sampled one."""
    id: str = field(default_factory=lambda: uuid4().hex)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What a server sampled."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str
    top: Mapping[str, float] = field(default_factory=dict[str, float])
    """The logprobs of the most likely tokens at the first position (`Ask.top`)."""
    cut: bool = False
    """The server stopped in the middle, as SGLang does before it loads new weights. The rest can be requested."""
    version: int | None = None
    """The version of the weights, if the server numbers them itself."""


class Wire(Protocol):
    """A server's wire format: translation only, without decisions."""

    @property
    def generate_path(self) -> str: ...
    @property
    def adapters_path(self) -> str | None:
        """The path before `/load_lora_adapter` and `/unload_lora_adapter`; None if there are no such routes."""
        ...

    @property
    def abort_path(self) -> str | None:
        """The route that aborts a request by its id; None if closing the connection aborts it."""
        ...

    def body(self, ask: Ask) -> dict[str, Any]: ...
    def headers(self, ask: Ask) -> dict[str, str]: ...
    def draw(self, body: Any) -> Draw:
        """Read an answer; raises ValidationError if it is not as documented."""
        ...

    def lacks_adapter(self, answer: ServerResponse) -> bool:
        """Whether an error says that the named adapter is not loaded."""
        ...

    def command(self, model: str, rank: int) -> str:
        """The command that starts such a server for training."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as its server lists it."""

    name: str
    context_length: int


def adapter_rank(folder: Path) -> int:
    """The rank of the LoRA adapter in this folder."""
    try:
        return int(json.loads((folder / "adapter_config.json").read_text())["r"])
    except (OSError, ValueError, LookupError) as error:
        hint = "an adapter folder is what PEFT's save writes"
        raise EngineError(f"`{folder}` holds no LoRA adapter", hint=hint) from error


@dataclass(slots=True, eq=False)
class _Adapter:
    """Weights that a server has loaded, or had loaded before it restarted."""

    version: int
    name: str | None = None
    """None for the model as it is served."""
    folder: Path = Path()
    rank: int = 0
    num_users: int = 0

    @classmethod
    def read(cls, folder: Path, version: int, nonce: str) -> Self:
        """Read the adapter in this folder and give it a unique name."""
        return cls(version, f"dockyard-{nonce}-v{version}", folder.absolute(), adapter_rank(folder))

    @contextmanager
    def used(self) -> Generator[None]:
        self.num_users += 1
        try:
            yield
        finally:
            self.num_users -= 1


class RemoteEngine:
    """Implements `Engine` over a server that was checked (`checks.py`)."""

    def __init__(self, server: ModelServer, wire: Wire, served: ServedModel, *, num_versions: int = 1) -> None:
        """`num_versions` stay loaded, for rollouts that started with them."""
        self._server = server
        self._num_versions = num_versions
        self._wire = wire
        self._served = served
        self._nonce = secrets.token_hex(4)
        self._adapters = [_Adapter(version=0)]
        """The newest last."""
        self._reloading = asyncio.Lock()
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def context_length(self) -> int:
        return self._served.context_length

    @property
    def version(self) -> int:
        return self._adapters[-1].version

    @property
    def down_s(self) -> float:
        return self._server.down_s

    async def generate(self, request: GenerateRequest) -> Generation | ContextOverflow:
        room = self.context_length - len(request.prompt_ids)
        if room < 1:
            return ContextOverflow(prompt_tokens=len(request.prompt_ids), context_length=self.context_length)
        request = replace(request, max_new_tokens=min(request.max_new_tokens, room))
        adapter = self._of_version(request.version)
        with adapter.used():
            return joined([part async for part in self._parts(request, adapter)])

    async def publish(self, adapter_dir: Path, version: int) -> None:
        adapter = _Adapter.read(adapter_dir, version, self._nonce)
        await self._load(adapter)
        self._adapters.append(adapter)
        await self._unload(self._num_versions)

    async def close(self) -> None:
        await asyncio.gather(*self._aborts)
        await self._unload(0)
        await self._server.close()

    def _of_version(self, version: int | None) -> _Adapter:
        newest = self._adapters[-1]
        return next((adapter for adapter in reversed(self._adapters) if adapter.version == version), newest)

    async def _parts(self, request: GenerateRequest, adapter: _Adapter) -> AsyncGenerator[Generation]:
        """Sample. If the server stops in the middle, continue from there, possibly with newer weights."""
        for _ in range(_MAX_CUTS):
            draw = await self._sample(request, adapter)
            part = generation_of(draw, request, adapter.version)
            yield part
            if not draw.cut or len(part.token_ids) == request.max_new_tokens:
                return
            request = replace(
                request,
                prompt_ids=np.concatenate([request.prompt_ids, part.token_ids]),
                max_new_tokens=request.max_new_tokens - len(part.token_ids),
            )
        raise EngineError(f"`{self._server.url}` stopped a call {_MAX_CUTS} times", hint="see its log")

    async def _sample(self, request: GenerateRequest, adapter: _Adapter) -> Draw:
        ask = Ask(request=request, model=self._served.name, adapter=adapter.name)
        answer = await self._ask(ask)
        if adapter.name and self._wire.lacks_adapter(answer):
            await self._reload(adapter)
            answer = await self._ask(ask)
        return read_draw(self._server, self._wire, answer)

    async def _ask(self, ask: Ask) -> ServerResponse:
        try:
            return await self._server.generate(self._wire.generate_path, self._wire.body(ask), self._wire.headers(ask))
        except asyncio.CancelledError:
            if self._wire.abort_path:
                self._in_background(self._abort(self._wire.abort_path, ask.id))
            raise

    async def _abort(self, path: str, request_id: str) -> None:
        try:
            await self._server.post(path, {"rid": request_id}, patient=False)
        except EngineError as error:  # a server that is gone does not sample either
            logger.debug("request %s could not be aborted: %s", request_id, error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _load(self, adapter: _Adapter) -> None:
        if self._wire.adapters_path is None:
            raise DockyardError(
                f"`{self._server.url}` cannot load new weights: it is an endpoint of type `openai`",
                hint="`--engine.type vllm` or `sglang` with a server that loads adapters, or `transformers`",
            )
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        # vLLM answers 500 if it rejects the adapter.
        path = f"{self._wire.adapters_path}/load_lora_adapter"
        answer = await self._server.post(path, body, final=frozenset({500}), timeout_s=_LOAD_TIMEOUT_S)
        if not answer.ok:
            raise EngineError(
                f"`{self._server.url}` cannot load the LoRA adapter `{adapter.folder}` of rank {adapter.rank}: "
                f"{answer.reason}",
                hint=f"start the server with `{self._wire.command(self._served.name, adapter.rank)}`, "
                "where it can read that folder",
            )

    async def _reload(self, adapter: _Adapter) -> None:
        """Load an adapter again after a restart. Of the requests that need it, one loads it."""
        async with self._reloading:
            cards = models_in(self._server, await self._server.get("/v1/models"))
            if adapter.name not in {card["id"] for card in cards}:
                logger.warning("%s no longer has version %d; loading it again", self._server.url, adapter.version)
                await self._load(adapter)

    async def _unload(self, keep: int) -> None:
        """Unload all adapters but the newest `keep`, and those that requests in progress use."""
        old = self._adapters[: len(self._adapters) - keep]
        unused = [adapter for adapter in old if adapter.num_users == 0]
        self._adapters = [adapter for adapter in self._adapters if adapter not in unused]
        path = f"{self._wire.adapters_path}/unload_lora_adapter"
        for adapter in unused:
            if adapter.name is None:
                continue
            try:
                await self._server.post(path, {"lora_name": adapter.name}, patient=False)
            except EngineError as error:  # it only takes up memory there
                logger.warning("version %d stays loaded: %s", adapter.version, error)


def models_in(server: ModelServer, answer: ServerResponse) -> list[dict[str, Any]]:
    """The entries of `/v1/models`: models, and adapters, which name their model as `parent`."""
    match answer.body:
        case {"data": [*cards]} if answer.ok:
            return cards
        case _:
            raise EngineError(f"`{server.url}/v1/models` lists no models: {answer.reason}", hint=key_hint(answer))


def key_hint(answer: ServerResponse) -> str:
    """A hint for an error response."""
    if answer.status in (401, 403):
        return "`--engine.api_key_env NAME` names the environment variable that holds the server's key"
    return "check `engine.url` and `engine.type`"


def read_draw(server: ModelServer, wire: Wire, answer: ServerResponse) -> Draw:
    """The tokens in an answer to an `Ask`."""
    where = f"`{server.url}{wire.generate_path}`"
    if not answer.ok:
        raise EngineError(f"{where} refused: {answer.reason}", hint=key_hint(answer))
    try:
        return wire.draw(answer.body)
    except ValidationError as error:
        text = json.dumps(answer.body)[:300]
        raise EngineError(f"{where} answered without token ids and logprobs: {text}", hint=key_hint(answer)) from error


def generation_of(draw: Draw, request: GenerateRequest, version: int) -> Generation:
    """A server's draw as a generation. Raises an error if it could not be trained on."""
    logprobs = np.array(draw.logprobs, dtype=np.float32)
    if len(draw.token_ids) != len(logprobs):
        raise EngineError(
            f"the server sent {len(draw.token_ids)} token ids with {len(logprobs)} logprobs", hint="see its log"
        )
    if not np.isfinite(logprobs).all() or (logprobs <= NO_LOGPROB).any():
        raise EngineError(
            "the server sent sampled tokens without a logprob (NaN, or -9999)",
            hint="its model computes NaN: try another dtype, e.g. `--dtype float32`",
        )
    if draw.finish not in _FINISHES:
        raise EngineError(f"the server ended a generation with `{draw.finish}`", hint="see its log")
    if request.temperature == 0:
        logprobs = np.zeros_like(logprobs)  # the most likely token is certain; servers report it as if sampled
    return Generation(
        token_ids=np.array(draw.token_ids, dtype=np.int32),
        logprobs=logprobs,
        versions=np.full(len(draw.token_ids), version if draw.version is None else draw.version, dtype=np.int32),
        finish=_FINISHES[draw.finish],
    )


def joined(parts: Sequence[Generation]) -> Generation:
    """Join parts of one generation, each sampled after the one before."""
    return Generation(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        finish=parts[-1].finish,
    )
