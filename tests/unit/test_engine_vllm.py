"""vLLM's wire format and what its servers may be started without."""

from pathlib import Path
from typing import Any

import pytest
from server_fakes import PROMPT, ask, expected, generate, refusal, serving, write_adapter

from dockyard.errors import DockyardError, EngineError


async def test_nothing_but_the_temperature_shapes_the_distribution():
    async with serving("vllm") as (engine, server):
        await generate(engine, ask(stop_ids=frozenset({9, 3})))
    [body] = server.bodies
    assert body == {
        "model": "policy",
        "token_ids": PROMPT,
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": 7,
            "max_tokens": 6,
            "stop_token_ids": [3, 9],
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        },
    }


async def test_older_servers_that_name_tokens_by_text_are_understood():
    async with serving("vllm", old_logprobs=True) as (engine, _):
        generation = await generate(engine, ask())
    assert generation.logprobs.tolist() == pytest.approx(expected(generation, PROMPT, 0.0), abs=1e-5)


async def test_a_server_without_the_token_route_is_told_the_flag():
    error = await refusal("vllm", enable_scale_out=False)
    assert "/inference/v1/generate` does not exist" in error.message
    assert "--enable-scale-out" in error.hint


async def test_raw_logprobs_are_refused_with_the_flag():
    assert (await refusal("vllm", processed=False)).hint == (
        "start the server with `--logprobs-mode processed_logprobs`"
    )


async def test_a_server_that_may_not_load_adapters_is_told_the_variable(tmp_path: Path):
    async with serving("vllm", runtime_lora_updating=False) as (engine, _):
        with pytest.raises(DockyardError, match="cannot load the LoRA adapter .* HTTP 404: Not Found") as caught:
            await engine.publish(write_adapter(tmp_path / "1", 2.0, rank=10), 0)
    assert "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve policy --enable-lora --max-lora-rank 16" in (
        caught.value.hint
    )


def drop_a_logprob(choice: dict[str, Any]) -> None:
    choice["logprobs"]["content"].pop()


def have_no_logprob(choice: dict[str, Any]) -> None:
    choice["logprobs"]["content"][2]["logprob"] = -9999.0


def have_no_ids(choice: dict[str, Any]) -> None:
    choice["token_ids"] = None


def be_aborted(choice: dict[str, Any]) -> None:
    choice["finish_reason"] = "abort"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (drop_a_logprob, "6 token ids with 5 logprobs"),
        (have_no_logprob, "without a logprob"),
        (have_no_ids, "without token ids and logprobs"),
        (be_aborted, "ended a generation with `abort`"),
    ],
)
async def test_an_answer_that_cannot_be_trained_on_is_an_engine_error(damage: Any, said: str):
    async with serving("vllm") as (engine, server):
        server.break_answer = damage
        with pytest.raises(EngineError, match=said):
            await engine.generate(ask())
