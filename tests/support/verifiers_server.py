"""verifiers' env server with our plug-in, in processes of its own, and a client of it."""

import asyncio
import multiprocessing
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import verifiers.v1 as vf
from npm_tokenizers import tokenizer_dir
from scripted_policy import Drawn
from verifiers.v1.serve import EnvClient, serve_env
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config, taskset_config_type
from vllm_generate_fake import MODEL

from dockyard.config import RunConfig
from dockyard.run_dir.run import RunDir

PATIENCE_S = 900.0
"""Bounds what hangs. Nothing takes as long."""
_NO_KEY = "DOCKYARD_TEST_NO_KEY"


def env_config(taskset: dict[str, Any], harness: dict[str, Any], **agent: Any) -> vf.EnvConfig:
    """As Prime-RL's `[orchestrator.train.source.env]` says it."""
    named = {"id": "harbor_env", **harness}
    return resolve_env_config({"taskset": {"id": "harbor_env", **taskset}, "agent": {"harness": named, **agent}})


def run_folder(path: Path, settings: dict[str, Any]) -> str:
    """A run with these settings, as `dockyard backend` leaves it for the plug-in."""
    RunDir.create(path, RunConfig.model_validate({"tasks": {"train": str(path / "tasks")}, **settings})).close()
    return str(path)


def task_data(folder: Path) -> dict[str, Any]:
    """The task in this folder as it goes over the wire."""
    config = taskset_config_type("harbor_env").model_validate({"id": "harbor_env", "tasks_dir": str(folder)})
    (task,) = load_taskset(config)
    return task.data.model_dump(mode="json")


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is up."""

    process: BaseProcess
    client: EnvClient

    async def trace(self, engine_url: str, task: dict[str, Any]) -> vf.WireTrace:
        """The trace of one episode, drawn from the vLLM at this address."""
        sampling = vf.SamplingConfig.model_validate({"temperature": 1.0})
        async with asyncio.timeout(PATIENCE_S):
            episode = await self.client.run(train_client(engine_url), MODEL, sampling, task)
        (trace,) = episode.traces
        return trace


def train_client(engine_url: str) -> vf.TrainClientConfig:
    """The client that draws tokens, rendering as Qwen3 with every thought kept."""
    return vf.TrainClientConfig.model_validate(
        {
            "base_url": f"{engine_url}/v1",
            "api_key_var": _NO_KEY,
            "renderer_model_name": str(tokenizer_dir("qwen3")),
            "renderer": {"name": "qwen3", "thinking_retention": "all"},
        }
    )


@asynccontextmanager
async def served(config: vf.EnvConfig, *, workers: int = 1) -> AsyncGenerator[Served]:
    """A server in a process of its own; several workers are processes of theirs. Ended with the block."""
    context = multiprocessing.get_context("spawn")
    addresses: multiprocessing.Queue[str] = context.Queue()
    os.environ.setdefault(_NO_KEY, "none")
    process = context.Process(target=serve, args=(config.model_dump(mode="json"), workers, addresses))
    process.start()
    try:
        await eventually(lambda: not (addresses.empty() and process.is_alive()))
        assert process.is_alive(), "the server ended at once"
        client = EnvClient(addresses.get())
        try:
            await client.wait_for_server_startup(timeout=PATIENCE_S)
            yield Served(process, client)
        finally:
            await eventually(lambda: not client._cancel_tasks)  # 0.3.1 may wait for them for ever
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


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what happens in other processes."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.05)


def assert_as_drawn(trace: vf.WireTrace, drawn: list[Drawn]) -> None:
    """Every token that the engine drew is trained in some branch, as itself, after exactly what the engine saw."""
    for one in drawn:
        assert any(_holds(branch, one) for branch in trace.branches)
    assert sum(sum(node.mask) for node in trace.nodes) == sum(len(one.generation.token_ids) for one in drawn)


def _holds(branch: vf.Branch, one: Drawn) -> bool:
    start, end = len(one.prompt_ids), len(one.after)
    return (
        np.array_equal(branch.token_ids[:end], one.after)
        and all(branch.sampled_mask[start:end])
        and np.array_equal(np.array(branch.logprobs[start:end], np.float32), one.generation.logprobs)
    )
