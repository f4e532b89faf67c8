"""The model behind rollouts that train nothing: found before anything starts, opened for as long as they are made.

Nothing is found or opened for an agent that asks no model, and no torch is loaded unless the embedded engine is used.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dockyard.collect.open import NoModel
from dockyard.config import RunConfig
from dockyard.engine.checks import ServerRequirements
from dockyard.engine.model_dir import find_model
from dockyard.engine.open import connect, connect_for_text, import_embedded
from dockyard.engine.openai import TextEndpoint
from dockyard.engine.protocol import Engine
from dockyard.engine.remote_engine import adapter_rank
from dockyard.engine.vllm_process import serving
from dockyard.errors import DockyardError
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.text_session import TextSource
from dockyard.rollout.agents.rows import asks_no_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is here of a model."""

    folder: Path
    renderer: Renderer


@dataclass(frozen=True, slots=True)
class Opened:
    """What the gateway samples from; without a renderer it is a source of text."""

    engine: Engine | TextSource
    renderer: Renderer | None


def find(config: RunConfig) -> Model | None:
    """The model's folder and its way of writing; None for one that only an `openai` endpoint knows, or nobody asks."""
    if asks_no_model(config.agent):
        return None
    embedded = config.engine.type == "transformers"
    if embedded:
        import_embedded("`--engine.type vllm --engine.url ...`")
    try:
        folder = find_model(config.model.name, weights=embedded or config.engine.launch)
        return Model(folder=folder, renderer=Renderer.load(folder, config.model.name))
    except DockyardError as error:
        if config.engine.type != "openai":
            raise
        logger.warning("no tokenizer for %s here: text mode, no token ids or logprobs (%s)", config.model.name, error)
        return None


@asynccontextmanager
async def opened(
    config: RunConfig, model: Model | None, adapter: Path | None = None, *, log: Path = Path(os.devnull)
) -> AsyncGenerator[Opened]:
    """The engine that the settings name, with this adapter loaded, closed with the block.

    `log` is where a server that is started for it writes.
    """
    if asks_no_model(config.agent):
        yield Opened(NoModel(), None)
        return
    async with _opened(config, model, adapter, log) as engine:
        if isinstance(engine, TextEndpoint):
            if adapter:
                hint = "serve the adapter there as a model of its own, and name it by `--engine.model`"
                raise DockyardError(f"`{config.engine.url}` cannot be given an adapter", hint=hint)
            yield Opened(engine, None)
        else:
            if adapter:
                await engine.publish(adapter, 1)
            assert model is not None, "an engine for ids is opened for a known model only"
            yield Opened(engine, model.renderer)


@asynccontextmanager
async def _opened(
    config: RunConfig, model: Model | None, adapter: Path | None, log: Path
) -> AsyncGenerator[Engine | TextEndpoint]:
    async with AsyncExitStack() as stack:
        if model is None:
            hint = "check `engine.url`; it is what a client takes as its base URL"
            engine = await connect_for_text(config.engine, config.model.name, hint=hint)
        elif config.engine.type == "transformers":
            engine = await _load(config, model)
        else:
            rank = adapter_rank(adapter) if adapter else config.trainer.lora_r
            wanted = ServerRequirements.of(config.model.name, model.folder, rank)
            server = serving(config.engine, config.model, model.folder, wanted, log)
            engine = await connect(await stack.enter_async_context(server), wanted)
        stack.push_async_callback(engine.close)
        yield engine


async def _load(config: RunConfig, model: Model) -> Engine:
    from dockyard.engine.embedded.engine import TransformersEngine
    from dockyard.engine.weights import load_model

    logger.info("loading %s", config.model.name)
    weights: Any = await asyncio.to_thread(load_model, model.folder, config.model)
    return TransformersEngine(weights, config.engine)
