"""SGLang's wire format."""

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from server_fakes import PROMPT, FakeSGLang, ask, generate, refusal, serving, write_adapter

from dockyard.engine.http import ModelServer
from dockyard.engine.remote_engine import RemoteEngine, ServedModel
from dockyard.engine.sglang import SGLangWire
from dockyard.errors import EngineError


async def test_nothing_but_the_temperature_shapes_the_distribution(tmp_path: Path):
    async with serving("sglang") as (engine, server):
        await generate(engine, ask(stop_ids=frozenset({9, 3})))
        await engine.publish(write_adapter(tmp_path / "1", 2.0), 1)
        await generate(engine, ask())
        [loaded] = server.adapters
    plain, adapted = server.bodies
    assert plain == {
        "rid": plain["rid"],
        "input_ids": PROMPT,
        "return_logprob": True,
        "top_logprobs_num": 0,
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "sampling_seed": 7,
            "max_new_tokens": 6,
            "stop_token_ids": [3, 9],
            "skip_special_tokens": False,
            "no_stop_trim": True,
        },
    }
    assert adapted["lora_path"] == loaded
    assert adapted["rid"] != plain["rid"]


async def test_original_logprobs_are_refused_with_the_variable():
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in (await refusal("sglang", processed=False)).hint


async def test_what_a_server_gives_up_for_new_weights_goes_on_from_there():
    whole = list[int]()
    for cuts in ([], [0, 2, 1, 0]):
        server = FakeSGLang(weight_version="7")
        await server.start()
        engine = RemoteEngine(
            ModelServer(server.url), SGLangWire(reports_versions=True), ServedModel(name="policy", context_length=512)
        )
        server.cuts = cuts.copy()
        drawn = await generate(engine, ask(temperature=0))
        await engine.close()
        await server.stop()
        assert drawn.versions.tolist() == [7] * 6
        whole = whole or drawn.token_ids.tolist()
        assert drawn.token_ids.tolist() == whole
    asked = [(body["input_ids"], body["sampling_params"]["max_new_tokens"]) for body in server.bodies]
    assert asked == [(PROMPT + whole[:known], 6 - known) for known in (0, 0, 2, 3, 3)]


async def test_a_server_that_gives_up_for_ever_has_failed():
    async with serving("sglang") as (engine, server):
        server.cuts = [0] * 1000
        with pytest.raises(EngineError, match="stopped a call 32 times"):
            await generate(engine, ask())


async def test_an_answer_without_tokens_is_refused_unless_it_was_given_up():
    wire = SGLangWire()
    assert wire.draw({"meta_info": {"finish_reason": {"type": "abort"}}}).cut
    with pytest.raises(ValidationError, match="output_token_logprobs"):
        wire.draw({"meta_info": {"finish_reason": {"type": "stop"}}})
    broken = {"type": "abort", "message": "too long", "status_code": 400}
    with pytest.raises(ValidationError, match="output_token_logprobs"):
        wire.draw({"meta_info": {"finish_reason": broken}})


async def test_calls_carry_what_a_router_keeps_them_together_by():
    async with serving("sglang") as (engine, server):
        server.routing_keys.clear()
        await generate(engine, replace(ask(), affinity="step-00003-001-02"))
        await generate(engine, ask())
    assert server.routing_keys == ["step-00003-001-02", None]


async def test_versions_count_only_where_somebody_else_loads_the_weights():
    async with serving("sglang") as (engine, server):
        server.weight_version = "9"
        drawn = await generate(engine, ask())
    assert set(drawn.versions.tolist()) == {0}
