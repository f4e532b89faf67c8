"""Opens the server that the settings name. The embedded engine, which needs torch, is not opened here."""

import os

from dockyard.config import EngineConfig
from dockyard.engine.checks import Wanted
from dockyard.engine.openai import TextEndpoint, connect_openai
from dockyard.engine.remote import RemoteEngine
from dockyard.engine.server import Server, read_key
from dockyard.engine.sglang import connect_sglang
from dockyard.engine.vllm import connect_vllm

_CONNECT = {"vllm": connect_vllm, "sglang": connect_sglang, "openai": connect_openai}


async def connect(config: EngineConfig, wanted: Wanted) -> RemoteEngine | TextEndpoint:
    """The server at `engine.url`, checked. Only an `openai` endpoint may turn out to be for text."""
    assert config.url is not None  # load_run_config refuses a server without it
    key = read_key(config.api_key_env, os.environ)
    server = Server(config.url, api_key=key, retry_s=config.retry_s)
    try:
        return await _CONNECT[config.type](server, config, wanted)
    except BaseException:
        await server.close()
        raise
