"""A run opens the server that its settings name, before it loads any weights."""

import pytest
from server_fakes import FakeHosted, FakeVLLM
from tiny_policy import tiny_model_dir

from dockyard.config import EngineConfig, RunConfig
from dockyard.engine.remote import RemoteEngine
from dockyard.errors import DockyardError
from dockyard.trainer import open_server


def config_for(kind: str, url: str) -> RunConfig:
    return RunConfig(engine=EngineConfig.model_validate({"type": kind, "url": url}))


async def test_the_embedded_engine_needs_no_server():
    assert await open_server(RunConfig(), tiny_model_dir()) is None


async def test_an_endpoint_for_text_cannot_be_trained_with():
    server = FakeHosted(models=("gpt",), max_model_len=None)
    await server.start()
    with pytest.raises(DockyardError, match="returns no token ids, so there is nothing to train on") as caught:
        await open_server(config_for("openai", server.url), tiny_model_dir())
    await server.stop()
    assert "--engine.type vllm" in caught.value.hint
    assert "dockyard serve" in caught.value.hint


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
