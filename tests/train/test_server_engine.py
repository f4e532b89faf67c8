"""A run opens the server that its settings name, before it loads any weights."""

from pathlib import Path

import pytest
from server_fakes import FakeHosted, FakeVLLM, write_adapter
from tiny_policy import tiny_model_dir

from dockyard.config import EngineConfig, RunConfig
from dockyard.engine.openai import TextEndpoint
from dockyard.engine.remote_engine import RemoteEngine
from dockyard.errors import DockyardError
from dockyard.trainer.modes import open_server


def config_for(kind: str, url: str) -> RunConfig:
    return RunConfig(engine=EngineConfig.model_validate({"type": kind, "url": url}))


async def test_the_embedded_engine_needs_no_server():
    assert await open_server(RunConfig(), tiny_model_dir()) is None


async def test_an_endpoint_without_token_ids_is_one_for_text():
    server = FakeHosted(models=("gpt",), max_model_len=None)
    await server.start()
    endpoint = await open_server(config_for("openai", server.url), tiny_model_dir())
    assert isinstance(endpoint, TextEndpoint)
    await endpoint.close()
    await server.stop()


async def test_an_openai_endpoint_that_tells_token_ids_is_trained_with_as_vllm(tmp_path: Path):
    server = FakeVLLM()
    server.tokenizer = tiny_model_dir() / "tokenizer.json"
    await server.start()
    engine = await open_server(config_for("openai", f"{server.url}/v1"), tiny_model_dir())
    assert isinstance(engine, RemoteEngine)
    await engine.publish(write_adapter(tmp_path / "adapter", 0.5), 1)
    assert engine.version == 1
    await engine.close()
    await server.stop()


async def test_the_ids_of_the_runs_own_tokenizer_are_compared_with_the_servers():
    server = FakeVLLM()  # its tokens are bytes
    await server.start()
    with pytest.raises(DockyardError, match="another tokenizer than `Qwen/Qwen2.5-Coder-7B-Instruct`"):
        await open_server(config_for("vllm", server.url), tiny_model_dir())
    server.tokenizer = tiny_model_dir() / "tokenizer.json"
    engine = await open_server(config_for("vllm", server.url), tiny_model_dir())
    assert isinstance(engine, RemoteEngine)
    await engine.close()
    await server.stop()
