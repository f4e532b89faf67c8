"""The engine in front of a server, against loopback servers that speak vLLM's and SGLang's wire formats."""

import asyncio
import logging
from pathlib import Path

import pytest
from gateway_fakes import until
from server_fakes import (
    KINDS,
    PROMPT,
    STOP,
    WANTED,
    FakeSGLang,
    ask,
    expected,
    generate,
    logprobs_of,
    open_engine,
    refusal,
    serving,
    write_adapter,
)

from dockyard.config import EngineConfig
from dockyard.engine.http import ModelServer
from dockyard.engine.open import connect
from dockyard.engine.protocol import ContextOverflow
from dockyard.engine.remote_engine import RemoteEngine, ServedModel
from dockyard.engine.sglang import SGLangWire
from dockyard.engine.vllm import VLLMWire
from dockyard.errors import DockyardError, EngineError
from dockyard.types import Finish


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


async def test_a_generation_has_the_ids_their_logprobs_under_the_temperature_and_the_version(kind: str):
    async with serving(kind) as (engine, _):
        generation = await generate(engine, ask())
    assert len(generation.token_ids) == 6
    assert generation.logprobs.tolist() == pytest.approx(expected(generation, PROMPT, 0.0), abs=1e-5)
    assert generation.versions.tolist() == [0] * 6
    assert generation.finish is Finish.LENGTH


async def test_the_same_seed_draws_the_same_tokens_and_another_draws_others(kind: str):
    async with serving(kind) as (engine, _):
        first, again, other = [await generate(engine, ask(seed=seed)) for seed in (1, 1, 2)]
    assert first.token_ids.tolist() == again.token_ids.tolist() != other.token_ids.tolist()


async def test_the_stop_token_is_the_last_id_and_has_a_logprob(kind: str):
    async with serving(kind) as (engine, _):
        generation = await generate(engine, ask(limit=400, stop_ids=frozenset({STOP, 7})))
    assert generation.finish is Finish.STOP
    assert int(generation.token_ids[-1]) in (STOP, 7)
    assert generation.logprobs.tolist() == pytest.approx(expected(generation, PROMPT, 0.0), abs=1e-5)


async def test_the_likeliest_token_is_certain_at_temperature_zero(kind: str):
    async with serving(kind) as (engine, _):
        generation = await generate(engine, ask(temperature=0, limit=3))
    assert generation.logprobs.tolist() == [0, 0, 0]
    assert generation.token_ids[0] == logprobs_of(PROMPT, 0.0, 1.0).argmax()


async def test_the_context_ends_a_generation_and_a_prompt_that_fills_it_is_an_overflow(kind: str):
    async with serving(kind, max_model_len=40) as (engine, server):
        assert engine.context_length == 40
        assert len((await generate(engine, ask([1] * 37))).token_ids) == 3
        assert await engine.generate(ask([1] * 40)) == ContextOverflow(prompt_tokens=40, context_length=40)
        assert len(server.bodies) == 1


async def test_published_weights_are_sampled_from_at_once_and_named_on_every_token(kind: str, tmp_path: Path):
    async with serving(kind) as (engine, _):
        for version, weight in ((1, 2.0), (2, -3.0)):
            await engine.publish(write_adapter(tmp_path / str(version), weight), version)
            generation = await generate(engine, ask())
            assert generation.versions.tolist() == [version] * 6
            # The same prompt: under a name used before, the server would find what the old weights computed.
            assert generation.logprobs.tolist() == pytest.approx(expected(generation, PROMPT, weight), abs=1e-5)
            assert generation.logprobs.tolist() != pytest.approx(expected(generation, PROMPT, weight + 1), abs=0.1)


async def test_a_rollout_keeps_the_weights_it_began_with_as_long_as_they_may_be_stale(kind: str, tmp_path: Path):
    weights = {1: 2.0, 2: -3.0, 3: 1.0}
    async with serving(kind, num_versions=2) as (engine, server):
        for version, weight in weights.items():
            await engine.publish(write_adapter(tmp_path / str(version), weight), version)
        assert (engine.version, len(server.adapters)) == (3, 2)
        for asked, given in ((2, 2), (3, 3), (None, 3), (1, 3)):  # version 1 is gone: the newest
            generation = await generate(engine, ask(version=asked))
            assert generation.versions.tolist() == [given] * 6
            assert generation.logprobs.tolist() == pytest.approx(expected(generation, PROMPT, weights[given]), abs=1e-5)


async def test_two_runs_on_one_server_do_not_meet(kind: str, tmp_path: Path):
    async with serving(kind) as (engine, server):
        await engine.publish(write_adapter(tmp_path / "a", 2.0), 1)
        other = await open_engine(kind, server)
        await other.publish(write_adapter(tmp_path / "b", -3.0), 1)
        for run, weight in ((engine, 2.0), (other, -3.0)):
            generation = await generate(run, ask())
            assert generation.logprobs.tolist() == pytest.approx(expected(generation, PROMPT, weight), abs=1e-5)
        await other.close()
        assert len(server.adapters) == 1


async def test_a_request_under_way_keeps_its_weights_and_they_stay_loaded_until_it_is_done(kind: str, tmp_path: Path):
    async with serving(kind) as (engine, server):
        await engine.publish(write_adapter(tmp_path / "1", 2.0), 1)
        server.hold = asyncio.Event()
        old = asyncio.create_task(generate(engine, ask()))
        await until(lambda: len(server.bodies) == 1)
        await engine.publish(write_adapter(tmp_path / "2", -3.0), 2)
        assert sorted(server.adapters.values()) == [-3.0, 2.0]
        server.hold.set()
        assert (await old).versions.tolist() == [1] * 6
        await engine.publish(write_adapter(tmp_path / "3", 1.0), 3)
        assert list(server.adapters.values()) == [1.0]
    assert server.adapters == {}


async def test_a_server_that_was_restarted_is_given_the_weights_again_once(kind: str, tmp_path: Path):
    async with serving(kind, retry_s=30) as (engine, server):
        await engine.publish(write_adapter(tmp_path / "1", 2.0), 1)
        await server.stop()
        calls = [asyncio.create_task(generate(engine, ask(seed=seed))) for seed in range(4)]
        await asyncio.sleep(0.1)  # they meet nobody
        await server.start()
        generations = await asyncio.gather(*calls)
        assert list(server.adapters.values()) == [2.0]
        path = "/v1/load_lora_adapter" if kind == "vllm" else "/load_lora_adapter"
        assert server.calls[path] == 2
    for generation in generations:
        assert generation.versions.tolist() == [1] * 6
        assert generation.logprobs.tolist() == pytest.approx(expected(generation, PROMPT, 2.0), abs=1e-5)


async def test_failures_that_pass_are_waited_out(kind: str, caplog: pytest.LogCaptureFixture):
    async with serving(kind, retry_s=30) as (engine, server):
        server.failures = [503, 500]
        assert len((await generate(engine, ask())).token_ids) == 6
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [f"{server.url} does not answer, retrying for 30 s: HTTP 503: no", f"{server.url} answers again"]


async def test_a_server_that_goes_on_failing_is_an_engine_error(kind: str):
    async with serving(kind) as (engine, server):
        server.failures = [503]
        with pytest.raises(EngineError, match="does not answer: HTTP 503: no"):
            await engine.generate(ask())
        server.failures = [400]
        with pytest.raises(EngineError, match="refused: HTTP 400: no"):
            await engine.generate(ask())


async def test_a_server_that_lets_its_clients_wait_for_ever_is_left(kind: str, caplog: pytest.LogCaptureFixture):
    leaving, next_one = KINDS[kind](hold=asyncio.Event()), KINDS[kind]()
    await leaving.start()
    server = ModelServer(leaving.url, retry_s=30, watch_s=0.1)
    wire = {"vllm": VLLMWire(), "sglang": SGLangWire()}[kind]
    engine = RemoteEngine(server, wire, ServedModel(name="policy", context_length=512))
    call = asyncio.create_task(generate(engine, ask()))
    await until(lambda: len(leaving.bodies) == 1)
    await leaving.stop_listening()
    await until(lambda: "stopped listening before it had answered" in caplog.text)
    next_one.port = leaving.port
    await next_one.start()
    assert len((await call).token_ids) == 6
    assert len(next_one.bodies) == 1
    await engine.close()
    await leaving.stop()
    await next_one.stop()


async def test_a_cancelled_request_is_aborted_in_the_server(kind: str):
    async with serving(kind) as (engine, server):
        server.hold = asyncio.Event()
        call = asyncio.create_task(engine.generate(ask()))
        await until(lambda: len(server.bodies) == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: server.num_aborted == 1)
        if isinstance(server, FakeSGLang):
            await until(lambda: server.aborted == [server.bodies[0]["rid"]])


async def test_an_adapter_of_a_larger_rank_than_the_servers_is_refused_with_the_flag(kind: str, tmp_path: Path):
    async with serving(kind) as (engine, _):
        with pytest.raises(DockyardError, match="rank 64 is greater than max_lora_rank 16") as caught:
            await engine.publish(write_adapter(tmp_path / "1", 2.0, rank=64), 1)
        assert "--enable-lora --max-lora-rank 64" in caught.value.hint
        assert (await generate(engine, ask())).versions.tolist() == [0] * 6


async def test_a_server_without_lora_is_refused_with_the_flags(kind: str, tmp_path: Path):
    async with serving(kind, enable_lora=False) as (engine, _):
        with pytest.raises(DockyardError, match="LoRA is not enabled") as caught:
            await engine.publish(write_adapter(tmp_path / "1", 2.0), 1)
        assert "--enable-lora --max-lora-rank 16" in caught.value.hint


async def test_a_folder_without_an_adapter_is_refused(kind: str, tmp_path: Path):
    async with serving(kind) as (engine, _):
        with pytest.raises(EngineError, match="holds no LoRA adapter"):
            await engine.publish(tmp_path, 1)


async def test_logprobs_that_leave_out_the_temperature_are_refused(kind: str):
    error = await refusal(kind, processed=False)
    assert "logprobs without the temperature" in error.message
    assert error.hint.startswith("start the server with")


async def test_logits_in_place_of_logprobs_are_refused(kind: str):
    assert "logprobs without the temperature" in (await refusal(kind, unnormalised=True)).message


async def test_another_tokenizer_is_refused_with_both_sides_ids(kind: str):
    error = await refusal(kind, token_offset=1)
    assert error.message.startswith("`http://127.0.0.1:")
    assert "has another tokenizer than `toy/model`: 'Say 12 words' is [84, 98," in error.message
    assert "and [83, 97," in error.message
    assert "toy/model" in error.hint


async def test_a_server_that_is_not_there_gets_the_command_that_starts_it(kind: str):
    with pytest.raises(EngineError, match="does not answer") as caught:
        await connect(EngineConfig.model_validate({"type": kind, "url": "http://127.0.0.1:9", "retry_s": 60}), WANTED)
    assert ("vllm serve toy/model" if kind == "vllm" else "launch_server --model-path toy/model") in caught.value.hint
    assert "--max-lora-rank 16" in caught.value.hint


async def test_the_model_is_the_only_one_listed_or_the_one_that_is_named(kind: str):
    several = await refusal(kind, models=("a", "b"))
    assert several.message.endswith("serves 2 models: `a`, `b`")
    assert "`--engine.model`" in several.hint
    assert (await refusal(kind, {"model": "c"}, models=("a", "b"))).message.endswith("serves no `c`: `a`, `b`")


async def test_a_context_longer_than_the_servers_is_refused_and_a_shorter_one_kept(kind: str):
    error = await refusal(kind, {"context_length": 1000})
    assert error.message.startswith("`engine.context_length` is 1000, and `http://127.0.0.1:")
    assert error.message.endswith("has 512")
    assert "--engine.context_length" in (await refusal(kind, max_model_len=None)).hint


async def test_the_key_comes_from_the_environment_and_is_never_shown(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    wish = {"api_key_env": "TOY_KEY"}
    monkeypatch.delenv("TOY_KEY", raising=False)
    assert "the environment variable `TOY_KEY`" in (await refusal(kind, wish)).message
    monkeypatch.setenv("TOY_KEY", "wrong-secret")
    wrong = await refusal(kind, wish, api_key="right-secret")
    assert "Incorrect API key: Bearer ***" in wrong.message
    assert "--engine.api_key_env" in (await refusal(kind, api_key="right-secret")).hint
    monkeypatch.setenv("TOY_KEY", "right-secret")
    server = KINDS[kind](api_key="right-secret")
    await server.start()
    engine = await connect(EngineConfig.model_validate({"type": kind, "url": server.url + "/v1/"} | wish), WANTED)
    assert isinstance(engine, RemoteEngine)
    assert len((await generate(engine, ask())).token_ids) == 6
    await engine.close()
    await server.stop()
    assert "secret" not in caplog.text + wrong.message + wrong.hint
