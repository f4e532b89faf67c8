"""Sessions drive the engine with exact ids, whatever the agent does to its history."""

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
from gateway_fakes import IM_END, FakeEngine, Said, tiny, tiny_renderer, until
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard.engine import ContextOverflow, GenerateRequest, Generation
from dockyard.gateway.forest import Message
from dockyard.gateway.sessions import Recording, RefusedError, Reply, Sampling, Session, turn_seed
from dockyard.types import Finish

SYSTEM, USER = Message("system", "Be brief."), Message("user", "count the lines")


def open_session(
    engine: FakeEngine, *, seed: int = 1, max_new_tokens: int = 50, max_calls: int | None = None
) -> Session:
    sampling = Sampling(seed=seed, temperature=0.7, max_new_tokens=max_new_tokens, max_calls=max_calls)
    return Session("test", sampling, engine, tiny_renderer())


async def ask(session: Session, *messages: Message, max_tokens: int | None = None) -> Reply:
    return await session.submit(messages, max_tokens)


def decoded(ids: np.ndarray) -> str:
    return tiny().decode(ids.tolist(), skip_special_tokens=False)


async def test_a_sampled_turn_stays_as_sampled_in_the_next_prompt():
    engine = FakeEngine([Said("list the files", pieces=1)])
    session = open_session(engine)
    first = await ask(session, SYSTEM, USER)
    second = await ask(session, SYSTEM, USER, Message("assistant", first.text), Message("user", "again"))
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
    await ask(session, SYSTEM, USER, Message("assistant", first.text), Message("user", "go on"))
    [segment] = session.close().segments
    cut = len(first.turn.prompt_ids) + len(first.turn.sampled_ids)
    assert segment.token_ids[cut] == IM_END
    assert segment.sampled[cut - 1]
    assert not segment.sampled[cut]


async def test_a_session_without_a_system_message_is_one_segment():
    session = open_session(FakeEngine())
    first = await ask(session, USER)
    await ask(session, USER, Message("assistant", first.text), Message("user", "again"))
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
    assert (recording.segments, recording.overflowed, recording.engine_failure, recording.calls) == ((), True, None, 1)


async def test_an_overflow_that_only_the_engine_sees_is_the_same_refusal():
    session = open_session(FakeEngine([ContextOverflow(prompt_tokens=30, context_length=20)]))
    with pytest.raises(RefusedError, match="maximum context length is 20 tokens"):
        await ask(session, USER)
    assert session.close().overflowed


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
    task = session.submit([USER], None)
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
    tasks = [session.submit([SYSTEM, question], None) for question in (USER, other, USER)]
    await until(lambda: len(engine.requests) == 3)
    assert engine.hold is not None
    engine.hold.set()
    replies = await asyncio.gather(*tasks)
    assert sorted(reply.text for reply in replies) == ["one", "three", "two"]
    check_exactness(engine, recording := session.close())
    assert (len(recording.segments), recording.stats["dropped_retries"]) == (2, 1)


def test_keys_are_secrets_of_128_bits_that_do_not_show():
    one, other = open_session(FakeEngine()), open_session(FakeEngine())
    assert one.key != other.key
    assert len(one.key) == 22  # base64 of 16 bytes
    assert one.key not in repr(one)


ACTIONS = ["echo", "trim", "drop", "edit", "back", "retry", "switch", "compact", "foreign"]


@dataclass
class Agent:
    """An agent with two conversations and habits of every kind."""

    session: Session
    conversations: list[list[Message]]
    active: int = 0

    async def act(self, action: str, words: str) -> None:
        history = self.conversations[self.active]
        match action:
            case "switch":
                self.active = 1 - self.active
            case "drop":
                del history[max(2, len(history) - 2) : len(history) - 1]
            case "edit":
                history[-2:-1] = [Message(history[-2].role, history[-2].text + " edited")] if len(history) > 3 else []
            case "back":
                del history[max(2, len(history) // 2 * 2 - 2) :]
            case "compact":
                history[1:] = [Message("user", f"summary {words}")]
            case "foreign":
                history += [Message("assistant", "understood"), Message("user", words)]
            case _:
                pass
        await self.call(words, trim=action == "trim", keep=action != "retry")

    async def call(self, words: str, *, trim: bool, keep: bool) -> None:
        history = self.conversations[self.active]
        reply = await ask(self.session, *history)
        if keep:
            text = f"  {reply.text.strip()}\n" if trim else reply.text
            history += [Message("assistant", text), Message("user", words)]


WORDS = st.sampled_from(["list files", "ok", "try  again\n", "<|im_end|>", "count é"])
LINES = st.builds(
    Said, WORDS, pieces=st.integers(1, 4), finish=st.sampled_from([Finish.STOP, Finish.STOP, Finish.LENGTH])
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), WORDS, LINES), min_size=1, max_size=10))
def test_whatever_the_agent_does_every_sampled_token_is_trained_once_in_the_context_it_was_sampled_in(
    steps: list[tuple[str, str, Said]],
):
    engine = FakeEngine([line for _, _, line in steps])
    session = open_session(engine)
    agent = Agent(session, [[SYSTEM, USER], [Message("system", "Be another."), USER]])

    async def run() -> None:
        for action, words, _ in steps:
            await agent.act(action, words)

    asyncio.run(run())
    recording = session.close()
    check_exactness(engine, recording)


def check_exactness(engine: FakeEngine, recording: Recording) -> None:
    # The engine answers in the order it was asked, so these belong together.
    calls = [
        (tuple(request.prompt_ids.tolist()), generation)
        for request, generation in zip(engine.requests, engine.generations, strict=True)
    ]
    whole = [(*prompt, *generation.token_ids.tolist()) for prompt, generation in calls]
    trained: list[float] = []
    for segment in recording.segments:
        assert segment.logprobs is not None
        assert segment.versions is not None
        assert tuple(segment.token_ids.tolist()) in whole  # what the engine was given and what it sampled
        assert (segment.logprobs[~segment.sampled] == 0).all()
        assert (segment.versions[~segment.sampled] == -1).all()
        trained += segment.logprobs[segment.sampled].tolist()
    assert len(trained) == len(set(trained))  # a logprob names one sampled token

    dropped = [number for number, (_, generation) in enumerate(calls) if generation.logprobs[0] not in trained]
    assert recording.stats["dropped_retries"] == len(dropped)
    for number, (prompt, generation) in enumerate(calls):
        if number in dropped:
            assert sum(other == prompt for other, _ in calls) > 1
        else:
            assert_trained_in_context(prompt, generation, recording)
    kept = [sequence for number, sequence in enumerate(whole) if number not in dropped]
    ends = [sequence for sequence in kept if not any(prompt[: len(sequence)] == sequence for prompt, _ in calls)]
    assert len(recording.segments) == len(ends)  # no fewer would hold every context
    assert recording.stats["sampled_tokens"] == len(trained) + sum(
        len(calls[number][1].token_ids) for number in dropped
    )


def assert_trained_in_context(prompt: tuple[int, ...], generation: Generation, recording: Recording) -> None:
    drawn = slice(len(prompt), len(prompt) + len(generation.token_ids))
    for segment in recording.segments:
        assert segment.logprobs is not None
        assert segment.versions is not None
        if np.array_equal(segment.logprobs[drawn], generation.logprobs):
            assert tuple(segment.token_ids[: drawn.start].tolist()) == prompt
            assert segment.token_ids[drawn].tolist() == generation.token_ids.tolist()
            assert segment.versions[drawn].tolist() == generation.versions.tolist()
            assert segment.sampled[drawn].all()
            return
    raise AssertionError("a sampled turn is in no segment")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["echo", "trim"]), WORDS, LINES), min_size=1, max_size=6))
def test_an_agent_that_only_echoes_gives_one_segment(steps: list[tuple[str, str, Said]]):
    engine = FakeEngine([line for _, _, line in steps])
    agent = Agent(open_session(engine), [[SYSTEM, USER]])

    async def run() -> None:
        for action, words, _ in steps:
            await agent.act(action, words)

    asyncio.run(run())
    recording = agent.session.close()
    check_exactness(engine, recording)
    assert len(recording.segments) == 1
    assert recording.stats["splices"] == len(steps) - 1
    assert recording.stats["reencoded_tokens"] == 0
