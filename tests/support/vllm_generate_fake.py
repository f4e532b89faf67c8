"""vLLM's token-level route over any engine of ours: `POST /inference/v1/generate`, as verifiers' client asks it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from dockyard.engine.protocol import ContextOverflow, Engine, GenerateRequest, Generation

MODEL = "policy"


@dataclass
class GenerateFake:
    """One server. A call that the engine fails gets `failure_status`, which clients take for the engine's failure."""

    engine: Engine
    max_model_len: int = 131_072
    failure_status: int = 500
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first call."""
    num_calls: int = 0
    url: str = ""

    async def generate(self, request: web.Request) -> web.Response:
        self.num_calls += 1
        self.asked.set()
        body: dict[str, Any] = await request.json()
        sampling = body["sampling_params"]
        try:
            drawn = await self.engine.generate(
                GenerateRequest(
                    prompt_ids=np.array(body["token_ids"], np.int32),
                    max_new_tokens=sampling.get("max_tokens") or 4096,
                    temperature=sampling.get("temperature", 1.0),
                    stop_ids=frozenset(sampling["stop_token_ids"]),
                    seed=0,
                )
            )
        except Exception as error:  # whatever a test's engine raises
            return web.json_response({"error": {"message": str(error)}}, status=self.failure_status)
        if isinstance(drawn, ContextOverflow):
            message = f"This model's maximum context length is {drawn.context_length} tokens. Your prompt is longer."
            return web.json_response({"error": {"message": message}}, status=400)
        return web.json_response({"request_id": f"r{self.num_calls}", "choices": [_choice(drawn)]})

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})


def _choice(drawn: Generation) -> dict[str, Any]:
    pairs = zip(drawn.token_ids.tolist(), drawn.logprobs.tolist(), strict=True)
    content = [{"token": f"token_id:{token_id}", "logprob": logprob} for token_id, logprob in pairs]
    return {
        "index": 0,
        "token_ids": drawn.token_ids.tolist(),
        "finish_reason": drawn.finish.value,
        "logprobs": {"content": content},
    }


@asynccontextmanager
async def generate_fake(
    engine: Engine, *, max_model_len: int = 131_072, failure_status: int = 500
) -> AsyncGenerator[GenerateFake]:
    """A server on a free port of this machine."""
    fake = GenerateFake(engine, max_model_len, failure_status)
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/inference/v1/generate", fake.generate)
    app.router.add_get("/v1/models", fake.models)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield fake
    finally:
        await runner.cleanup()
