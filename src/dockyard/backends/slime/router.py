"""The engine behind our gateway under SLiME: the router in front of the SGLang servers that SLiME gives new weights."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from dockyard.backends.slime.post import Post
from dockyard.engine import Engine
from dockyard.engine.checks import Wanted, check_logprobs
from dockyard.engine.model_dir import find_model
from dockyard.engine.remote import RemoteEngine, Served
from dockyard.engine.server import Server
from dockyard.engine.sglang import SGLangWire

_RETRY_S = 600.0
"""Engines that died are started again by SLiME, which takes its time."""


@asynccontextmanager
async def open_router(post: Post) -> AsyncGenerator[Engine]:
    """An engine that samples from the newest weights, closed with the block."""
    server, wire = Server(post.router_url, retry_s=_RETRY_S), SGLangWire(tells_versions=True, adapter=post.adapter)
    served = Served(name=post.model, context_length=post.context_length)
    engine = RemoteEngine(server, wire, served)
    try:
        wanted = Wanted.of(post.model, find_model(post.model, weights=False), lora_rank=0)
        hint = "start the engines without `SGLANG_RETURN_ORIGINAL_LOGPROB` in their environment"
        await check_logprobs(server, wire, served, wanted, hint=hint)
        yield engine
    finally:
        await engine.close()
