"""Sessions in front of an endpoint that returns no token ids."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from gateway_fakes import until

from dockyard.errors import EngineError
from dockyard.gateway.accounting import SessionLimits
from dockyard.gateway.protocol import ClientSampling, ModelReply, RefusedError
from dockyard.gateway.server import Gateway, Timeouts
from dockyard.gateway.sessions import Sampling
from dockyard.gateway.text_session import EndpointEcho, TextSession, TextSessions
from dockyard.types import Finish, Message, Prompt, ToolCall

type Json = dict[str, Any]

USER = Message("user", "count the lines")
TOOL = {"type": "function", "function": {"name": "bash", "description": "", "parameters": {"type": "object"}}}


def answer(
    text: str | None = "done", finish: str = "stop", usage: tuple[int, int] | None = (10, 3), **said: Any
) -> Json:
    body: Json = {"choices": [{"message": {"content": text, **said}, "finish_reason": finish}]}
    return body if usage is None else body | {"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}


def called(arguments: str, call_id: str = "toolu_7") -> Json:
    call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return answer(None, "tool_calls", tool_calls=[call])


@dataclass
class FakeSource:
    """Gives its answers one by one, then `done` for ever."""

    answers: list[Json | Exception] = field(default_factory=list)
    down_s: float = 0.0
    hold: asyncio.Event | None = None
    bodies: list[Json] = field(default_factory=list)

    async def chat(self, body: Json) -> Json:
        self.bodies.append(body)
        if self.hold:
            await self.hold.wait()
        line = self.answers.pop(0) if self.answers else answer()
        if isinstance(line, Exception):
            raise line
        return line


def session_on(source: FakeSource, **limits: Any) -> TextSession:
    sampling = Sampling(seed=1, temperature=0.7, max_new_tokens=50)
    return TextSession("test", sampling, SessionLimits(**limits), source)


async def ask(session: TextSession, *messages: Message, max_tokens: int | None = None, **wishes: Any) -> ModelReply:
    return await session.submit(Prompt(messages or (USER,), (TOOL,)), max_tokens, ClientSampling(**wishes))


async def test_messages_tools_thoughts_and_call_ids_reach_the_endpoint():
    call = ToolCall("toolu_7", "bash", {"command": "wc -l é"})
    messages = (
        Message("system", "Be brief."),
        USER,
        Message("assistant", "", "Hm.", (call,)),
        Message("tool", "3", call_id="toolu_7"),
    )
    await ask(session_on(source := FakeSource()), *messages)
    [body] = source.bodies
    assert body["tools"] == [TOOL]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "count the lines"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "toolu_7",
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"command": "wc -l é"}'},
                }
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "toolu_7"},
    ]


async def test_sampling_is_the_sessions_unless_wishes_are_passed_on():
    session = session_on(source := FakeSource())
    await ask(session)
    await ask(session, max_tokens=9, temperature=0.0, seed=5)
    first, second = source.bodies
    assert (first["temperature"], first["max_tokens"]) == (0.7, 50)
    assert (second["temperature"], second["max_tokens"], second["seed"]) == (0.0, 9, 5)
    assert first["seed"] != 5


async def test_each_exchange_is_recorded_as_text_and_what_repeats_is_stored_once():
    session = session_on(
        FakeSource([called('{"command": "ls"}'), answer("Three.", "length", (20, 4), reasoning="Hm.")])
    )
    first = await ask(session)
    await ask(session, Message("user", "count the lines"), first.message, Message("tool", "3", call_id="toolu_7"))
    recording = session.close()
    one, two = recording.exchanges
    assert recording.segments == ()
    assert one.reply.calls == (ToolCall("toolu_7", "bash", {"command": "ls"}),)
    assert (one.num_prompt, one.num_sampled) == (10, 3)
    assert (two.reply, two.finish) == (Message("assistant", "Three.", "Hm."), Finish.LENGTH)
    assert two.prompt.messages[0] is one.prompt.messages[0]
    assert (recording.calls, recording.stats["prompt_tokens"], recording.stats["sampled_tokens"]) == (2, 30, 7)


@pytest.mark.parametrize("arguments", ['{"command": "ls', "[1]", "ls"])
async def test_a_call_without_valid_json_is_text_to_the_agent(arguments: str):
    reply = await ask(session_on(FakeSource([called(arguments)])))
    assert reply.message.calls == ()
    assert arguments in reply.message.text


async def test_an_endpoint_that_insists_on_its_own_name_for_the_limit_gets_it_from_then_on():
    refusal = EngineError("refused: HTTP 400: Unsupported parameter: use 'max_completion_tokens' instead", hint="-")
    session = session_on(source := FakeSource([refusal]))
    assert (await ask(session)).message.text == "done"
    await ask(session)
    assert [body.get("max_tokens") for body in source.bodies] == [50, None, None]
    assert [body.get("max_completion_tokens") for body in source.bodies] == [None, 50, 50]


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.",
        "Your input exceeds the context window of this model.",
        "prompt is too long: 9000 tokens > 8192 maximum",
    ],
)
async def test_an_overflow_in_the_endpoints_words_is_one_in_ours(words: str):
    session = session_on(FakeSource([EngineError(f"refused: HTTP 400: {words}", hint="-")]))
    with pytest.raises(RefusedError) as refused:
        await ask(session)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    recording = session.close()
    assert words in (recording.overflow or "")
    assert recording.engine_failure is None


@pytest.mark.parametrize("line", [EngineError("gone", hint="-"), {"choices": []}, {"choices": [{"message": "hi"}]}])
async def test_a_failure_or_nonsense_of_the_endpoint_is_the_engines(line: Json | Exception):
    session = session_on(FakeSource([line]))
    with pytest.raises(RefusedError) as refused:
        await ask(session)
    assert (refused.value.status, refused.value.code) == (502, "engine_failure")
    assert session.close().engine_failure is not None


@pytest.mark.parametrize(
    ("limits", "code"),
    [({"max_calls": 1}, "calls_limit_reached"), ({"max_sampled_tokens": 3}, "sampled_tokens_limit_reached")],
)
async def test_limits_hold_as_with_tokens(limits: Json, code: str):
    session = session_on(source := FakeSource(), **limits)
    await ask(session)
    with pytest.raises(RefusedError) as refused:
        await ask(session)
    assert (refused.value.status, refused.value.code, len(source.bodies)) == (403, code, 1)


async def test_a_call_may_sample_what_is_left_of_the_session():
    session = session_on(source := FakeSource(), max_sampled_tokens=5)
    await ask(session)
    await ask(session)
    assert [body["max_tokens"] for body in source.bodies] == [5, 2]


async def test_where_the_endpoint_counts_nothing_the_bytes_are_counted():
    session = session_on(FakeSource([answer("x" * 40, usage=None)]))
    reply = await ask(session)
    assert (reply.num_sampled, reply.num_prompt) == (10, await session.count_tokens(Prompt((USER,), (TOOL,))))
    assert 20 < reply.num_prompt < 60


async def test_closing_drops_what_is_under_way_and_refuses_the_rest():
    session = session_on(source := FakeSource(hold=asyncio.Event()))
    task = session.submit(Prompt((USER,)), None)
    await until(lambda: len(source.bodies) == 1)
    recording = session.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (recording.calls, recording.answered, recording.exchanges) == (1, 0, ())
    for late in (session.submit(Prompt((USER,)), None), session.count_tokens(Prompt((USER,)))):
        with pytest.raises(RefusedError, match="not valid"):
            await late


@asynccontextmanager
async def serving(source: FakeSource) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    gateway = Gateway(TextSessions(source), "policy", timeouts=Timeouts(retry_grace_s=0.01))
    await gateway.start()
    async with aiohttp.ClientSession() as http:
        yield gateway, http
    await gateway.close()


BODIES: dict[str, Json] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]},
    "messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "bash", "input_schema": {"type": "object"}}],
    },
    "responses": {"input": "hi", "tools": [{"type": "function", "name": "bash", "parameters": {"type": "object"}}]},
}


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_dialect_is_answered_with_the_endpoints_own_tool_ids(route: str, stream: bool):
    async with serving(source := FakeSource([called('{"command":"ls"}', "call_of_theirs")])) as (gateway, http):
        session = gateway.open_session("test", seed=1, temperature=1.0, max_new_tokens=50)
        headers = {"Authorization": f"Bearer {session.key}"}
        body = BODIES[route] | {"stream": stream}
        async with http.post(f"{gateway.url}/{route}", json=body, headers=headers) as response:
            text = await response.text()
        recording = gateway.close_session(session)
    assert response.status == 200
    assert "call_of_theirs" in text
    assert [tool["function"]["name"] for tool in source.bodies[0]["tools"]] == ["bash"]
    assert len(recording.exchanges) == 1
    assert recording.stats["undelivered"] == 0


async def test_the_endpoints_own_count_of_tokens_is_what_the_agent_gets():
    async with serving(FakeSource([answer("hi", usage=(12_000, 34))])) as (gateway, http):
        session = gateway.open_session("test", seed=1, temperature=1.0, max_new_tokens=50)
        headers = {"x-api-key": session.key}
        async with http.post(f"{gateway.url}/messages", json=BODIES["messages"], headers=headers) as response:
            usage = json.loads(await response.text())["usage"]
        async with http.get(f"{gateway.url}/models", headers=headers) as response:
            [model] = (await response.json())["data"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (12_000, 34)
    assert "max_model_len" not in model


def thinking(arguments: str) -> Json:
    body = called(arguments, "call_0")
    body["choices"][0]["message"]["reasoning_content"] = "Let me see."
    return body


def echoed(reply: ModelReply) -> Message:
    """A turn as most agents send it back: without its thoughts."""
    return replace(reply.message, reasoning="")


def recalling(source: FakeSource) -> TextSession:
    sampling = Sampling(seed=1, temperature=1.0, max_new_tokens=None)
    return TextSession("a", sampling, SessionLimits(), source, EndpointEcho())


async def test_a_recalled_turn_goes_back_word_for_word_and_its_calls_have_ids_of_their_own():
    arguments = '{"command":  "ls \\u00e9"}'
    source = FakeSource([thinking(arguments), thinking(arguments)])
    session = recalling(source)
    history = [USER]
    for _ in range(2):
        reply = await session.submit(Prompt(tuple(history), (TOOL,)), None)
        history += [echoed(reply), Message("tool", "a", call_id=reply.message.calls[0].id)]
    await session.submit(Prompt(tuple(history), (TOOL,)), None)
    assert history[1].calls[0].id != history[3].calls[0].id
    said = thinking(arguments)["choices"][0]["message"]
    result = {"role": "tool", "content": "a", "tool_call_id": "call_0"}
    assert source.bodies[-1]["messages"] == [{"role": "user", "content": "count the lines"}, *[said, result] * 2]


async def test_a_turn_that_the_agent_changed_or_moved_is_sent_as_the_agent_has_it():
    source = FakeSource([thinking('{"command": "ls"}')])
    session = recalling(source)
    reply = await session.submit(Prompt((USER,), (TOOL,)), None)
    other = replace(reply.message.calls[0], arguments={"command": "rm"})
    changed = replace(echoed(reply), calls=(other,))
    moved = (Message("user", "a summary"), echoed(reply))
    for messages in ((USER, changed), moved):
        await session.submit(Prompt((*messages, Message("user", "go on")), (TOOL,)), None)
        sent = source.bodies[-1]["messages"][1]
        assert "reasoning_content" not in sent
        assert sent["tool_calls"][0]["id"] == "call_0"
    assert json.loads(source.bodies[-2]["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"command": "rm"}


async def test_the_same_words_after_another_history_recall_the_turn_that_was_said_there():
    source = FakeSource([answer("OK", reasoning_content="first"), answer("OK", reasoning_content="second")])
    session = recalling(source)
    first = await session.submit(Prompt((USER,)), None)
    again = (USER, echoed(first), USER)
    second = await session.submit(Prompt(again), None)
    await session.submit(Prompt((*again, echoed(second), USER)), None)
    thoughts = [message.get("reasoning_content") for message in source.bodies[-1]["messages"]]
    assert thoughts == [None, "first", None, "second", None]
