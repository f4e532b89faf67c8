"""Open an engine: the one place that turns settings into something that samples.

Every caller goes through `open_engine` (`dockyard serve`, rollouts without training, the trainer's servers), except two
that start from something else than settings: SLiME's router (`open_router`), and a policy in this process, whose
embedded engine shares its weights (`trainer/learner.py`). torch is imported only to load the embedded engine.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dockyard.config import EngineConfig, ModelConfig
from dockyard.engine.checks import PROBE_TEXT, ServerRequirements, check_logprobs, find_card
from dockyard.engine.custom import CheckedEngine, ModelLimits, context_length, open_custom
from dockyard.engine.http import ModelServer, read_key
from dockyard.engine.openai import URL_HINT, TextEndpoint, connect_openai, probe_endpoint
from dockyard.engine.protocol import Engine, EngineSetup
from dockyard.engine.quiet_imports import hide_import_warnings
from dockyard.engine.remote_engine import RemoteEngine, ServedModel, adapter_rank
from dockyard.engine.sglang import SGLangWire, connect_sglang
from dockyard.engine.vllm import connect_vllm
from dockyard.engine.vllm_process import serving
from dockyard.errors import DockyardError

logger = logging.getLogger(__name__)

_CONNECT = {"vllm": connect_vllm, "sglang": connect_sglang, "openai": connect_openai}
_ROUTER_RETRY_S = 600.0
"""SLiME restarts SGLang servers that died, which can take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Which engine to open, and what it must be able to do."""

    engine: EngineConfig
    model: ModelConfig
    model_dir: Path | None
    """Holds the tokenizer, and for an engine that is not a server the weights. With None only text can be exchanged."""
    lora_rank: int
    """Of the adapters that will be published. The rank of `adapter` takes precedence."""
    num_versions: int = 1
    """Versions of the weights that are sampled from at the same time."""
    adapter: Path | None = None
    """A LoRA adapter to publish as soon as the engine is open."""
    adapter_version: int = 1
    """The version that the adapter's tokens are marked with."""
    log: Path = Path(os.devnull)
    """Receives the output of a vLLM server that is started for this engine."""

    def requirements(self) -> ServerRequirements:
        """What a server must fulfil."""
        assert self.model_dir is not None, "requirements on token ids need a tokenizer"
        rank = adapter_rank(self.adapter) if self.adapter else self.lora_rank
        return ServerRequirements.of(self.model.name, self.model_dir, rank, self.num_versions)


@asynccontextmanager
async def open_engine(spec: EngineSpec) -> AsyncGenerator[Engine | TextEndpoint]:
    """Open the engine that the settings name, publish the adapter if there is one, and close both with the block."""
    async with AsyncExitStack() as stack:
        engine = await _open(spec, stack)
        stack.push_async_callback(engine.close)
        if spec.adapter:
            await _publish(engine, spec.adapter, spec)
        yield engine


async def _open(spec: EngineSpec, stack: AsyncExitStack) -> Engine | TextEndpoint:
    if spec.model_dir is None:
        return await connect_for_text(spec.engine, spec.model.name)
    if spec.engine.type == "transformers":
        return await _load_embedded(spec.engine, spec.model, spec.model_dir)
    required = spec.requirements()
    if spec.engine.is_custom:
        return await _open_custom(spec, spec.model_dir, required)
    server = serving(spec.engine, spec.model, spec.model_dir, required, spec.log)
    return await connect(await stack.enter_async_context(server), required)


async def _open_custom(spec: EngineSpec, model_dir: Path, required: ServerRequirements) -> CheckedEngine:
    limits = ModelLimits.read(model_dir)
    setup = EngineSetup(
        model_dir=model_dir,
        model=spec.model,
        context_length=context_length(spec.engine, limits),
        lora_rank=required.lora_rank,
        num_versions=required.num_versions,
    )
    logger.info("opening %s", spec.engine.type)
    return await open_custom(spec.engine, setup, limits.vocab_size, required.token_ids)


async def _publish(engine: Engine | TextEndpoint, adapter: Path, spec: EngineSpec) -> None:
    if isinstance(engine, TextEndpoint):
        raise DockyardError(
            f"`{spec.engine.url}` cannot load an adapter",
            hint="serve the adapter there as a model of its own and name it by `--engine.model`, or leave it out",
        )
    await engine.publish(adapter, spec.adapter_version)


async def connect(config: EngineConfig, required: ServerRequirements) -> RemoteEngine | TextEndpoint:
    """Connect to the server at `engine.url` and check it. Only an `openai` endpoint may turn out to be text-only."""
    server = _server(config)
    try:
        return await _CONNECT[config.type](server, config, required)
    except BaseException:
        await server.close()
        raise


async def connect_for_text(config: EngineConfig, model: str) -> TextEndpoint:
    """Connect to an endpoint for text only, whatever it returns: without a tokenizer, token ids are of no use."""
    server = _server(config)
    try:
        card = await find_card(server, config.model_copy(update={"model": config.model or model}), hint=URL_HINT)
    except BaseException:
        await server.close()
        raise
    return TextEndpoint(server, str(card["id"]))


async def text_only_model(config: EngineConfig) -> str | None:
    """The name of the model that an `openai` endpoint serves as text only; None if it returns token ids."""
    server = _server(config)
    try:
        endpoint = await probe_endpoint(server, config, PROBE_TEXT)
    finally:
        await server.close()
    return endpoint.model if endpoint.prompt_ids is None else None


def text_endpoint(config: EngineConfig, model: str) -> TextEndpoint:
    """The endpoint at `engine.url`, for a model that it is known to serve."""
    return TextEndpoint(_server(config), model)


def _server(config: EngineConfig) -> ModelServer:
    assert config.url is not None, "settings that name a server without `engine.url` are refused when they are read"
    return ModelServer(config.url, api_key=read_key(config.api_key_env, os.environ), retry_s=config.retry_s)


def check_embedded() -> None:
    """Raise an error that names what is missing if the embedded engine cannot be imported. Importing takes seconds."""
    hide_import_warnings()
    for name in ("torch", "transformers", "peft"):
        if find_spec(name) is None:
            raise DockyardError(
                f"the embedded engine needs `{name}`, which is not installed",
                hint="`pip install 'dockyard[train]'`, or `--engine.type vllm --engine.url ...`",
            )


async def _load_embedded(config: EngineConfig, model: ModelConfig, model_dir: Path) -> Engine:
    check_embedded()
    from dockyard.engine.embedded.engine import TransformersEngine
    from dockyard.engine.weights import load_model

    logger.info("loading %s", model.name)
    weights: Any = await asyncio.to_thread(load_model, model_dir, model)
    return TransformersEngine(weights, config)


@asynccontextmanager
async def open_router(
    url: str, model: ServedModel, model_dir: Path, *, adapter: str | None = None
) -> AsyncGenerator[Engine]:
    """Open the router in front of SGLang servers whose weights another program updates and numbers.

    `adapter` names the LoRA adapter to sample from, if the weights are one.
    """
    server, wire = ModelServer(url, retry_s=_ROUTER_RETRY_S), SGLangWire(reports_versions=True, adapter=adapter)
    engine = RemoteEngine(server, wire, model)
    try:
        required = ServerRequirements.of(model.name, model_dir, lora_rank=0)
        hint = "start the engines without `SGLANG_RETURN_ORIGINAL_LOGPROB` in their environment"
        await check_logprobs(server, wire, model, required, hint=hint)
        yield engine
    finally:
        await engine.close()
