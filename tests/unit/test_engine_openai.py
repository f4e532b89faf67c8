"""OpenAI-compatible endpoints: those that return token ids, and those that do not."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from server_fakes import PROMPT, WANTED, FakeHosted, FakeServer, FakeVLLM, ask, expected, generate, write_adapter

from dockyard.config import EngineConfig
from dockyard.engine.open import connect
from dockyard.engine.openai import TextEndpoint
from dockyard.engine.remote_engine import RemoteEngine
from dockyard.errors import DockyardError, EngineError


@asynccontextmanager
async def connected(server: FakeServer, **wish: Any) -> AsyncGenerator[RemoteEngine | TextEndpoint]:
    await server.start()
    endpoint = None
    try:
        endpoint = await connect(EngineConfig.model_validate({"type": "openai", "url": server.url} | wish), WANTED)
        yield endpoint
    finally:
        if endpoint:
            await endpoint.close()
        await server.stop()


async def test_an_endpoint_that_tells_token_ids_is_an_engine():
    async with connected(FakeVLLM(enable_scale_out=False)) as engine:
        assert isinstance(engine, RemoteEngine)
        generation = await generate(engine, ask())
    assert generation.logprobs.tolist() == pytest.approx(expected(generation, PROMPT, 0.0), abs=1e-5)


async def test_nothing_but_the_temperature_shapes_the_distribution():
    server = FakeVLLM()
    async with connected(server) as engine:
        assert isinstance(engine, RemoteEngine)
        await generate(engine, ask(stop_ids=frozenset({9, 3})))
    assert server.bodies[-1] == {
        "model": "policy",
        "prompt": PROMPT,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": 7,
        "max_tokens": 6,
        "stop_token_ids": [3, 9],
        "logprobs": 1,
        "return_token_ids": True,
    }


async def test_its_tokenizer_and_its_logprobs_are_checked():
    with pytest.raises(EngineError, match="logprobs without the temperature"):
        async with connected(FakeVLLM(processed=False)):
            pass
    other = WANTED.token_ids[:-1]
    server = FakeVLLM()
    await server.start()
    wanted = type(WANTED)(model="toy/model", lora_rank=16, text=WANTED.text, token_ids=other)
    with pytest.raises(EngineError, match="has another tokenizer"):
        await connect(EngineConfig(type="openai", url=server.url), wanted)
    await server.stop()


async def test_it_cannot_be_given_new_weights(tmp_path: Path):
    async with connected(FakeVLLM()) as engine:
        assert isinstance(engine, RemoteEngine)
        with pytest.raises(DockyardError, match="cannot load new weights") as caught:
            await engine.publish(write_adapter(tmp_path / "1", 2.0), 0)
    assert "--engine.type vllm" in caught.value.hint


@pytest.mark.parametrize("completions", [False, True])
async def test_an_endpoint_that_tells_no_token_ids_is_for_text(completions: bool, caplog: pytest.LogCaptureFixture):
    server = FakeHosted(models=("gpt", "gpt-mini"), max_model_len=None, completions=completions)
    async with connected(server, model="gpt") as endpoint:
        assert isinstance(endpoint, TextEndpoint)
        answer = await endpoint.chat(
            {"model": "policy", "messages": [{"role": "user", "content": "?"}], "stream": True}
        )
    assert answer["choices"][0]["message"]["content"] == "hi"
    assert server.bodies[-1] == {"model": "gpt", "messages": [{"role": "user", "content": "?"}], "stream": False}
    assert "returns no token ids: text mode" in caplog.text
    assert "nothing can be trained on them exactly" in caplog.text


async def test_what_a_text_endpoint_refuses_is_an_engine_error():
    server = FakeHosted(models=("gpt", "other"), max_model_len=None)
    async with connected(server, model="other") as endpoint:
        assert isinstance(endpoint, TextEndpoint)
        with pytest.raises(EngineError, match="refused: HTTP 404: no such model"):
            await endpoint.chat({"messages": []})


async def test_a_wrong_key_is_an_error_and_not_text_mode():
    with pytest.raises(EngineError, match="HTTP 401") as caught:
        async with connected(FakeHosted(models=("gpt",), api_key="secret")):
            pass
    assert "--engine.api_key_env" in caught.value.hint
