"""Sessions drive the engine with exact ids, whatever the agent does to its history."""

import asyncio

import numpy as np
import pytest
from gateway_fakes import IM_END, FakeEngine, Said, tiny, tiny_renderer, until

from dockyard.engine.protocol import ContextOverflow, GenerateRequest, Generation
from dockyard.gateway.accounting import SessionLimits
from dockyard.gateway.protocol import ModelReply, RefusedError
from dockyard.gateway.sessions import Sampling, TokenSession, turn_seed
from dockyard.types import Finish, Message, Prompt

SYSTEM, USER = Message("system", "Be brief."), Message("user", "count the lines")


def open_session(
    engine: FakeEngine, *, seed: int = 1, max_new_tokens: int = 50, max_calls: int | None = None
) -> TokenSession:
    sampling = Sampling(seed=seed, temperature=0.7, max_new_tokens=max_new_tokens)
    return TokenSession("test", sampling, SessionLimits(max_calls=max_calls), engine, tiny_renderer())


async def ask(session: TokenSession, *messages: Message, max_tokens: int | None = None) -> ModelReply:
    return await session.submit(Prompt(messages), max_tokens)


def decoded(ids: np.ndarray) -> str:
    return tiny().decode(ids.tolist(), skip_special_tokens=False)


async def test_a_sampled_turn_stays_as_sampled_in_the_next_prompt():
    engine = FakeEngine([Said("list the files", pieces=1)])
    session = open_session(engine)
    first = await ask(session, SYSTEM, USER)
    second = await ask(session, SYSTEM, USER, Message("assistant", first.message.text), Message("user", "again"))
    seen = [*first.turn.prompt_ids, *first.turn.sampled_ids]
    assert tiny().encode("list the files").ids != first.turn.sampled_ids.tolist()[:-1]
    assert second.turn.prompt_ids.tolist()[: len(seen)] == seen
    assert decoded(second.turn.prompt_ids[len(seen) :]) == (
        "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_cut_turn_is_closed_before_it_is_continued_and_the_closing_is_not_trained():
    engine = FakeEngine([Said("list the f", finish=Finish.LENGTH)])
    session = open_session(engine)
    first = await ask(session, SYSTEM, USER)
    await ask(session, SYSTEM, USER, Message("assistant", first.message.text), Message("user", "go on"))
    [segment] = session.close().segments
    cut = len(first.turn.prompt_ids) + len(first.turn.sampled_ids)
    assert segment.token_ids[cut] == IM_END
    assert segment.sampled[cut - 1]
    assert not segment.sampled[cut]


async def test_a_session_without_a_system_message_is_one_segment():
    session = open_session(FakeEngine())
    first = await ask(session, USER)
    await ask(session, USER, Message("assistant", first.message.text), Message("user", "again"))
    assert len(session.close().segments) == 1


async def test_sampling_is_the_sessions_and_each_call_has_its_own_seed():
    engine = FakeEngine()
    session = open_session(engine, seed=5, max_new_tokens=50)
    await ask(session, USER)
    await ask(session, USER, max_tokens=7)
    await ask(session, USER, max_tokens=7000)
    assert [request.max_new_tokens for request in engine.requests] == [50, 7, 50]
    assert {request.temperature for request in engine.requests} == {0.7}
    assert [request.seed for request in engine.requests] == [turn_seed(5, number) for number in range(3)]
    assert engine.requests[0].stop_ids == tiny_renderer().stop_ids


def test_seeds_repeat_for_the_same_session_and_call_only():
    pairs = [(session, number) for session in range(20) for number in range(20)]
    seeds = [turn_seed(*pair) for pair in pairs]
    assert len(set(seeds)) == len(pairs)
    assert seeds == [turn_seed(*pair) for pair in pairs]
    assert 0 <= min(seeds) <= max(seeds) < 2**63


async def test_a_prompt_that_nearly_fills_the_context_leaves_the_rest_to_sample():
    session = open_session(engine := FakeEngine())
    await ask(session, USER)
    engine.context_length = len(engine.requests[0].prompt_ids) + 3
    await ask(session, USER)
    assert engine.requests[1].max_new_tokens == 3


async def test_a_prompt_that_fills_the_context_is_refused_and_remembered():
    session = open_session(FakeEngine(context_length=10))
    with pytest.raises(RefusedError, match="maximum context length is 10 tokens") as caught:
        await ask(session, USER)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    recording = session.close()
    assert (recording.segments, bool(recording.overflow), recording.engine_failure, recording.calls) == (
        (),
        True,
        None,
        1,
    )


async def test_an_overflow_that_only_the_engine_sees_is_the_same_refusal():
    session = open_session(FakeEngine([ContextOverflow(prompt_tokens=30, context_length=20)]))
    with pytest.raises(RefusedError, match="maximum context length is 20 tokens"):
        await ask(session, USER)
    assert session.close().overflow


async def test_an_engine_that_raises_is_remembered_as_the_engines_fault():
    session = open_session(FakeEngine([RuntimeError("out of memory")]))
    with pytest.raises(RefusedError) as caught:
        await ask(session, USER)
    assert caught.value.status == 502
    assert "memory" not in caught.value.message
    assert session.close().engine_failure == "RuntimeError: out of memory"


async def test_an_engine_that_forgets_a_logprob_is_remembered_as_the_engines_fault():
    class Forgetful(FakeEngine):
        def _draw(self, ids: list[int], finish: Finish) -> Generation:
            whole = super()._draw(ids, finish)
            return Generation(
                token_ids=whole.token_ids, logprobs=whole.logprobs[1:], versions=whole.versions, finish=finish
            )

    session = open_session(Forgetful([Said("ls", pieces=1)]))
    with pytest.raises(RefusedError):
        await ask(session, USER)
    assert session.close().engine_failure == "3 ids came with 2 logprobs and 3 versions"


async def test_an_engine_that_cancels_a_call_itself_is_remembered_as_its_fault():
    class Closing(FakeEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            raise asyncio.CancelledError

    session = open_session(Closing())
    with pytest.raises(RefusedError) as caught:
        await ask(session, USER)
    assert caught.value.status == 502
    assert "dropped a call" in (session.close().engine_failure or "")


async def test_calls_past_the_limit_are_refused_and_not_counted():
    session = open_session(engine := FakeEngine(), max_calls=1)
    await ask(session, USER)
    with pytest.raises(RefusedError) as caught:
        await ask(session, USER)
    recording = session.close()
    assert caught.value.status == 403
    assert (recording.calls, recording.stats["refused"], len(engine.requests)) == (1, 1, 1)


async def test_closing_drops_the_calls_under_way_and_refuses_new_ones():
    session = open_session(engine := FakeEngine(hold=asyncio.Event()))
    task = session.submit(Prompt((USER,)), None)
    await until(lambda: len(engine.requests) == 1)
    recording = session.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(RefusedError) as caught:
        await ask(session, USER)
    assert (engine.num_cancelled, caught.value.status) == (1, 401)
    assert (recording.calls, recording.segments) == (1, ())


async def test_calls_at_the_same_time_do_not_disturb_each_other():
    session = open_session(engine := FakeEngine([Said("one"), Said("two"), Said("three")], hold=asyncio.Event()))
    other = Message("user", "something else")
    tasks = [session.submit(Prompt((SYSTEM, question)), None) for question in (USER, other, USER)]
    await until(lambda: len(engine.requests) == 3)
    assert engine.hold is not None
    engine.hold.set()
    replies = await asyncio.gather(*tasks)
    assert sorted(reply.message.text for reply in replies) == ["one", "three", "two"]
    recording = session.close()
    pairs = zip(engine.requests, engine.generations, strict=True)
    seen = [[*request.prompt_ids.tolist(), *generation.token_ids.tolist()] for request, generation in pairs]
    assert all(segment.token_ids.tolist() in seen for segment in recording.segments)
    assert (len(recording.segments), recording.stats["dropped_retries"]) == (2, 1)


def test_keys_are_secrets_of_128_bits_that_do_not_show():
    one, other = open_session(FakeEngine()), open_session(FakeEngine())
    assert one.key != other.key
    assert len(one.key) == 22  # base64 of 16 bytes
    assert one.key not in repr(one)


async def test_a_session_asks_for_the_weights_it_began_with():
    session = open_session(engine := FakeEngine(version=4))
    await session.submit(Prompt((USER,)), None)
    engine.version = 5
    await session.submit(Prompt((Message("user", "something else"),)), None)
    assert [request.version for request in engine.requests] == [4, 4]


async def test_how_long_the_engine_was_away_is_on_the_record():
    session = open_session(engine := FakeEngine(down_s=10.0))
    await session.submit(Prompt((USER,)), None)
    engine.down_s = 35.0
    assert session.close().engine_down_s == 25.0


async def test_an_engine_that_failed_and_came_back_is_no_failure():
    session = open_session(FakeEngine([RuntimeError("gone"), Said("back")]))
    with pytest.raises(RefusedError):
        await session.submit(Prompt((USER,)), None)
    await session.submit(Prompt((USER,)), None)
    assert session.close().engine_failure is None
