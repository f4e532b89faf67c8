"""SGLang's wire format."""

from pathlib import Path

from server_fakes import PROMPT, ask, generate, refusal, serving, write_adapter


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
