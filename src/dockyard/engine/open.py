"""Opens the server that the settings name. The embedded engine, which needs torch, is not opened here."""

import os

from dockyard.config import EngineConfig
from dockyard.engine.checks import ServerRequirements, find_card
from dockyard.engine.http import ModelServer, read_key
from dockyard.engine.openai import TextEndpoint, connect_openai
from dockyard.engine.remote_engine import RemoteEngine
from dockyard.engine.sglang import connect_sglang
from dockyard.engine.vllm import connect_vllm
from dockyard.errors import DockyardError

_CONNECT = {"vllm": connect_vllm, "sglang": connect_sglang, "openai": connect_openai}


def import_embedded(hint: str) -> None:
    """Say what is missing for the embedded engine. `hint` is what to do instead of installing it."""
    try:
        from dockyard.engine import weights
        from dockyard.engine.embedded import engine

        del engine, weights
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("dockyard"):
            raise
        raise DockyardError(
            f"the embedded engine needs `{error.name}`, which is not installed",
            hint=f"`pip install 'dockyard[train]'`, or {hint}",
        ) from error


async def connect_for_text(config: EngineConfig, model: str, *, hint: str) -> TextEndpoint:
    """Without a tokenizer nothing can be said in ids, whatever the endpoint returns."""
    assert config.url is not None  # whoever reads settings refuses a server without it
    server = ModelServer(config.url, api_key=read_key(config.api_key_env, os.environ), retry_s=config.retry_s)
    try:
        named = config.model_copy(update={"model": config.model or model})
        card = await find_card(server, named, hint=hint)
    except BaseException:
        await server.close()
        raise
    return TextEndpoint(server, str(card["id"]))


async def connect(config: EngineConfig, wanted: ServerRequirements) -> RemoteEngine | TextEndpoint:
    """The server at `engine.url`, checked. Only an `openai` endpoint may turn out to be for text."""
    assert config.url is not None  # load_run_config refuses a server without it
    key = read_key(config.api_key_env, os.environ)
    server = ModelServer(config.url, api_key=key, retry_s=config.retry_s)
    try:
        return await _CONNECT[config.type](server, config, wanted)
    except BaseException:
        await server.close()
        raise
