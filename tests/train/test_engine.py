import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_policy import CPU, make_group, tiny_model_dir, tiny_policy

from dockyard.config import EngineConfig
from dockyard.engine.embedded.decode import sample
from dockyard.engine.embedded.engine import TransformersEngine
from dockyard.engine.protocol import ContextOverflow, GenerateRequest, Generation
from dockyard.engine.weights import load_model
from dockyard.errors import EngineError
from dockyard.rl.pack import Example, pack
from dockyard.trainer.policy import Policy
from dockyard.types import Finish, IntArray

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 300, length).astype(np.int32) for length in (5, 40, 17, 3, 60, 17, 29, 8)]


@asynccontextmanager
async def engine_of(policy: Policy | None = None, **settings: object) -> AsyncGenerator[TransformersEngine]:
    model = policy.serving_model() if policy else load_model(tiny_model_dir(), CPU)
    engine = TransformersEngine(model, EngineConfig.model_validate(settings))
    try:
        yield engine
    finally:
        await engine.close()


def request(
    prompt: IntArray, *, new: int = 12, seed: int = 0, temperature: float = 1.0, stop: frozenset[int] = frozenset()
) -> GenerateRequest:
    return GenerateRequest(prompt_ids=prompt, max_new_tokens=new, temperature=temperature, stop_ids=stop, seed=seed)


async def drawn(engine: TransformersEngine, asked: GenerateRequest) -> Generation:
    result = await engine.generate(asked)
    assert isinstance(result, Generation)
    return result


def training_logprobs(policy: Policy, prompt: IntArray, generation: Generation) -> np.ndarray:
    ids = np.concatenate([prompt, generation.token_ids])
    targets = np.arange(len(prompt), len(ids), dtype=np.int32)
    [row] = pack([Example(token_ids=ids, targets=targets, old_logprobs=None, advantage=1, weight=1)], 10_000)
    with torch.no_grad():
        return policy.logprobs(row).numpy()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_engine_logprobs_equal_training_logprobs_of_the_same_ids(temperature: float):
    policy = tiny_policy(temperature=temperature)
    policy.update([make_group([0.0, 1.0])], 10)
    async with engine_of(policy, max_batch=4) as engine:
        asked = [request(prompt, seed=index, temperature=temperature) for index, prompt in enumerate(PROMPTS)]
        generations = await asyncio.gather(*(drawn(engine, one) for one in asked))
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        np.testing.assert_allclose(generation.logprobs, training_logprobs(policy, prompt, generation), atol=1e-4)
        assert len(generation.token_ids) == len(generation.versions) == 12


async def test_prompts_that_begin_alike_share_keys_and_values_without_changing_a_logprob():
    policy = tiny_policy()
    head = PROMPTS[4]
    prompts = [np.concatenate([head, PROMPTS[index]]) for index in (0, 1, 2, 3)] + [head, head]
    async with engine_of(policy) as engine:
        for turn in range(2):  # the second time everything is known
            asked = [request(prompt, seed=index + 10 * turn) for index, prompt in enumerate(prompts)]
            generations = await asyncio.gather(*(drawn(engine, one) for one in asked))
            for prompt, generation in zip(prompts, generations, strict=True):
                np.testing.assert_allclose(
                    generation.logprobs, training_logprobs(policy, prompt, generation), atol=1e-4
                )


async def test_requests_join_and_leave_while_others_are_decoded():
    policy = tiny_policy()
    async with engine_of(policy, max_batch=3, prefix_cache_mb=0) as engine:

        async def late(index: int, prompt: IntArray) -> Generation:
            await asyncio.sleep(index * 0.01)
            return await drawn(engine, request(prompt, new=5 + 20 * index, seed=index))

        generations = await asyncio.gather(*(late(index, prompt) for index, prompt in enumerate(PROMPTS)))
    for index, (prompt, generation) in enumerate(zip(PROMPTS, generations, strict=True)):
        assert len(generation.token_ids) == 5 + 20 * index
        np.testing.assert_allclose(generation.logprobs, training_logprobs(policy, prompt, generation), atol=1e-4)


async def test_deterministic_results_do_not_depend_on_what_else_is_asked():
    async with engine_of(deterministic=True) as engine:
        alone = await drawn(engine, request(PROMPTS[1], seed=7))
        crowd = [drawn(engine, request(prompt, seed=index)) for index, prompt in enumerate(PROMPTS)]
        among, *_ = await asyncio.gather(drawn(engine, request(PROMPTS[1], seed=7)), *crowd)
        other = await drawn(engine, request(PROMPTS[1], seed=8))
    assert alone.token_ids.tolist() == among.token_ids.tolist()
    assert alone.logprobs.tobytes() == among.logprobs.tobytes()
    assert alone.token_ids.tolist() != other.token_ids.tolist()


async def test_a_stop_id_ends_a_turn_and_is_part_of_it():
    async with engine_of() as engine:
        free = await drawn(engine, request(PROMPTS[0]))
        stop = int(free.token_ids[4])
        stopped = await drawn(engine, request(PROMPTS[0], stop=frozenset({stop})))
    first = free.token_ids.tolist().index(stop)
    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert (free.finish, stopped.finish) == (Finish.LENGTH, Finish.STOP)


async def test_a_prompt_that_fills_the_context_is_an_answer_and_one_token_less_is_cut():
    async with engine_of(context_length=40) as engine:
        assert await engine.generate(request(PROMPTS[1])) == ContextOverflow(prompt_tokens=40, context_length=40)
        assert await engine.generate(request(PROMPTS[4])) == ContextOverflow(prompt_tokens=60, context_length=40)
        cut = await drawn(engine, request(PROMPTS[1][:37], new=12))
    assert (len(cut.token_ids), cut.finish) == (3, Finish.LENGTH)


async def test_a_context_longer_than_the_memory_is_refused_and_one_that_nobody_asked_for_is_cut():
    gb = 64 * 2 * 2 * 2 * 8 * 4 / 2**30  # of 64 tokens
    with pytest.raises(EngineError, match="`engine.context_length` is 60 tokens, and there is memory .* of 48"):
        async with engine_of(context_length=60, kv_cache_gb=gb):
            pass
    async with engine_of(kv_cache_gb=gb) as engine:
        assert engine.context_length == 48
        assert await engine.generate(request(PROMPTS[4])) == ContextOverflow(prompt_tokens=60, context_length=48)
        whole = await drawn(engine, request(PROMPTS[1], new=100))
    assert (len(whole.token_ids), whole.finish) == (8, Finish.LENGTH)


class Paced:
    """An engine that advances only by explicit steps."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._allowed, self._done = threading.Semaphore(0), 0
        self._advance, engine._batch.advance = engine._batch.advance, self._step

    def _step(self) -> None:
        self._allowed.acquire()
        self._advance()
        self._done += 1

    def let_go(self) -> None:
        self._allowed.release(10_000)

    async def advance(self, times: int) -> None:
        aim = self._done + times
        self._allowed.release(times)
        while self._done < aim:
            await asyncio.sleep(0.001)


async def test_a_cancelled_request_makes_room_for_others():
    async with engine_of(max_batch=1) as engine:
        paced = Paced(engine)
        long = asyncio.create_task(engine.generate(request(PROMPTS[0], new=400)))
        await paced.advance(5)
        waiting = asyncio.create_task(engine.generate(request(PROMPTS[2], new=3)))
        await paced.advance(50)
        assert not waiting.done()
        long.cancel()
        paced.let_go()
        done = await waiting
    assert isinstance(done, Generation)
    assert long.cancelled()


def saved(policy: Policy, folder: Path) -> Path:
    policy.save_weights(folder)
    return folder


async def test_new_weights_are_served_at_once_and_nothing_computed_under_the_old_ones_is_used(tmp_path: Path):
    policy = tiny_policy(lr=0.1)
    prompt = PROMPTS[4]
    async with engine_of(policy) as engine:
        before = await drawn(engine, request(prompt))
        for _ in range(3):
            policy.update([make_group([0.0, 1.0])], 10)
        await engine.publish(saved(policy, tmp_path), 3)
        after = await drawn(engine, request(prompt))
    assert set(before.versions.tolist()) == {0}
    assert set(after.versions.tolist()) == {3}
    np.testing.assert_allclose(after.logprobs, training_logprobs(policy, prompt, after), atol=1e-4)
    stale = training_logprobs(policy, prompt, before)
    assert np.abs(stale - before.logprobs).max() > 0.05  # the update was large enough to tell


async def test_a_model_without_adapters_takes_its_first_while_it_is_served(tmp_path: Path):
    policy = tiny_policy(lr=0.1)
    for _ in range(3):
        policy.update([make_group([0.0, 1.0])], 10)
    async with engine_of() as engine:
        before = await drawn(engine, request(PROMPTS[4]))
        await engine.publish(saved(policy, tmp_path), 1)
        after = await drawn(engine, request(PROMPTS[4]))
    np.testing.assert_allclose(after.logprobs, training_logprobs(policy, PROMPTS[4], after), atol=1e-4)
    assert np.abs(training_logprobs(policy, PROMPTS[4], before) - before.logprobs).max() > 0.05


async def test_a_request_in_flight_goes_on_under_new_weights_with_each_token_marked(tmp_path: Path):
    policy, moved = tiny_policy(lr=0.1), tiny_policy(lr=0.1)
    for _ in range(3):
        moved.update([make_group([0.0, 1.0])], 10)
    async with engine_of(policy) as engine:
        paced = Paced(engine)
        flying = asyncio.create_task(engine.generate(request(PROMPTS[1], new=40)))
        await paced.advance(5)
        publishing = asyncio.create_task(engine.publish(saved(moved, tmp_path), 1))
        await asyncio.sleep(0)  # now it is asked for
        await paced.advance(2)
        paced.let_go()
        await publishing
        generation = await flying
    assert isinstance(generation, Generation)
    new = generation.versions == 1
    assert new.any()
    assert not new.all()
    assert (np.diff(generation.versions) >= 0).all()
    np.testing.assert_allclose(
        generation.logprobs[new], training_logprobs(moved, PROMPTS[1], generation)[new], atol=1e-4
    )
    np.testing.assert_allclose(
        generation.logprobs[~new], training_logprobs(policy, PROMPTS[1], generation)[~new], atol=1e-4
    )


async def test_a_folder_without_an_adapter_is_refused_and_the_old_weights_stay(tmp_path: Path):
    async with engine_of(tiny_policy()) as engine:
        with pytest.raises(EngineError, match="holds no adapter"):
            await engine.publish(tmp_path, 1)
        assert set((await drawn(engine, request(PROMPTS[0]))).versions.tolist()) == {0}


async def test_an_engine_that_broke_says_so_to_everyone():
    async with engine_of() as engine:
        too_high = np.array([10_000], np.int32)  # no such token: the embedding fails
        with pytest.raises(EngineError, match="stopped"):
            await engine.generate(request(too_high))
        with pytest.raises(EngineError, match="stopped"):
            await engine.generate(request(PROMPTS[0]))


def test_tokens_are_drawn_as_often_as_their_probability_says():
    logits = torch.tensor([[2.0, 0.0, 1.0, -30.0]])
    draws = np.random.default_rng(0).random(20_000)
    ids, logprobs = sample(logits.repeat(len(draws), 1), [2.0] * len(draws), draws.tolist())
    expected = torch.softmax(logits[0] / 2.0, -1)
    found = np.bincount(ids, minlength=4) / len(draws)
    np.testing.assert_allclose(found, expected.numpy(), atol=0.01)
    assert logprobs[0] == pytest.approx(float(expected.log()[ids[0]]), abs=1e-6)


def test_temperature_zero_is_certain_of_the_likeliest_token():
    assert sample(torch.tensor([[0.0, 3.0, 1.0]]), [0.0], [0.999]) == ([1], [0.0])
