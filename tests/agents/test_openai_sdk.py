"""A loop with tools over the OpenAI SDK, as anybody would write one; and what the SDK does when things break."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from agent_stories import open_session, openai_sdk, served
from gateway_fakes import pending_calls, until, until_noticed
from openai import AsyncOpenAI
from scripted_policy import Line, Say, Script, ScriptedEngine, assert_one_segment, lines, tool_call, turn
from sdk_loop import TOOLS, ask, converse

from dockyard.gateway.server import Gateway, Timeouts
from dockyard.gateway.sessions import Session
from dockyard.types import Finish

HELLO: Any = [{"role": "user", "content": "Hello."}]


@dataclass(frozen=True, slots=True)
class Stage:
    engine: ScriptedEngine
    gateway: Gateway
    session: Session
    client: AsyncOpenAI


@asynccontextmanager
async def staged(script: Script, hold: asyncio.Event | None = None, grace_s: float = 2) -> AsyncGenerator[Stage]:
    engine = ScriptedEngine(script, hold=hold)
    async with served(engine, timeouts=Timeouts(keep_alive_s=0.1, retry_grace_s=grace_s)) as gateway:
        session = open_session(gateway)
        async with AsyncOpenAI(base_url=gateway.url, api_key=session.key) as client:
            yield Stage(engine, gateway, session, client)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_six_calls_with_odd_json_are_one_segment(stream: bool):
    async with staged(lines(*openai_sdk())) as stage:
        messages = await converse(stage.client, stream=stream)
        recording = stage.gateway.close_session(stage.session)
    assert [message["content"] for message in messages if message["role"] == "tool"] == [
        "3.0",
        "7",
        "11",
        "2",
        "4",
        "10",
    ]
    assert messages[-1]["content"] == "It is ten."
    assert len(stage.engine.drawn) == 6
    assert_one_segment(stage.engine, recording.segments)


@pytest.mark.parametrize(
    "said",
    [
        Say("Adding.\n" + tool_call('{"name": "add", "arguments": {"a": 1')),
        Say("<think>\nI could go on for", finish=Finish.LENGTH),
    ],
    ids=["malformed", "cut"],
)
async def test_a_turn_that_went_wrong_can_be_answered_in_the_same_segment(said: Say):
    async with staged(lines(said, turn("Done."))) as stage:
        messages = await converse(stage.client)
        messages.append({"role": "user", "content": "Go on."})
        await ask(stage.client, messages)
        recording = stage.gateway.close_session(stage.session)
    assert_one_segment(stage.engine, recording.segments)


async def test_the_sdk_tries_again_after_an_engine_failure_and_nothing_is_trained_twice():
    script: list[Line] = [openai_sdk()[0], RuntimeError("no memory"), *openai_sdk()[1:]]
    async with staged(lines(*script)) as stage:
        await converse(stage.client)
        recording = stage.gateway.close_session(stage.session)
    assert len(stage.engine.prompts) == 7
    assert len(stage.engine.drawn) == 6
    assert_one_segment(stage.engine, recording.segments)


@asynccontextmanager
async def breaking(gateway: Gateway, *, answers: int) -> AsyncGenerator[str]:
    """A way to the gateway that breaks off while the next answer after `answers` whole ones is brought."""
    seen = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        there = await asyncio.open_connection("127.0.0.1", int(gateway.root_url.rpartition(":")[2]))
        request = asyncio.create_task(_copy(reader, there[1]))
        while data := await there[0].read(1 << 16):
            seen += data.count(b"HTTP/1.1 200")
            if seen == answers + 1:
                seen = -1000
                break
            writer.write(data)
        request.cancel()
        for end in (writer, there[1]):
            end.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)


async def test_an_answer_lost_on_the_way_is_brought_again_and_trained_once():
    async with staged(lines(*openai_sdk())) as stage, breaking(stage.gateway, answers=2) as url:
        messages = await converse(stage.client.with_options(base_url=url))
        recording = stage.gateway.close_session(stage.session)
    assert messages[-1]["content"] == "It is ten."
    assert recording.stats["joined_retries"] == 1
    assert len(stage.engine.drawn) == 6
    assert_one_segment(stage.engine, recording.segments)


async def test_a_client_that_loses_patience_and_asks_again_gets_what_is_being_sampled_for_it():
    hold = asyncio.Event()

    async def answer_who_comes_back(gateway: Gateway) -> None:
        await until(lambda: any(call.num_waiting for call in pending_calls(gateway)))
        await until_noticed(gateway)
        await until(lambda: any(call.num_waiting for call in pending_calls(gateway)))
        hold.set()

    async with staged(lines(*openai_sdk()), hold, grace_s=600) as stage:  # its pauses grow with every try
        answering = asyncio.create_task(answer_who_comes_back(stage.gateway))
        await converse(stage.client.with_options(timeout=0.4, max_retries=99))
        await answering
        recording = stage.gateway.close_session(stage.session)
    assert recording.stats["joined_retries"] >= 1
    assert len(stage.engine.prompts) == 6
    assert_one_segment(stage.engine, recording.segments)


async def test_a_client_that_hangs_up_mid_stream_ends_the_sampling_and_leaves_nothing_to_train():
    hold = asyncio.Event()
    async with staged(lines(*openai_sdk()), hold) as stage:
        stream = await stage.client.chat.completions.create(model="policy", messages=HELLO, tools=TOOLS, stream=True)
        async for _ in stream:  # a sign of life: nothing is sampled yet
            break
        await stream.close()
        await until(lambda: stage.engine.num_cancelled == 1)
        hold.set()
        await converse(stage.client)
        recording = stage.gateway.close_session(stage.session)
    assert len(stage.engine.prompts) == 7
    assert_one_segment(stage.engine, recording.segments)
