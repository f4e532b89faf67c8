"""Agents that hang up and ask again, over HTTP: an answer is sampled and trained once, however often it is wanted."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product

import pytest
from gateway_fakes import FakeEngine, Said, pending_calls, tiny_renderer, until, until_noticed, until_sampled
from raw_http import RawAnswer, RawRequest, exchange

from dockyard.gateway.server import Gateway, Timeouts
from dockyard.gateway.sessions import Recording, Session, TokenSessions

USER = {"role": "user", "content": "count the lines"}
ROUTES = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 50},
    "/v1/responses": {"input": [USER]},
}
RETRY = ("x-stainless-retry-count", "1")
GRACE_S = 50.0  # far longer than any test takes


class Client:
    """An agent whose requests are the same bytes each time."""

    def __init__(self, gateway: Gateway, engine: FakeEngine, path: str, *, stream: bool) -> None:
        self.gateway, self.engine, self.path, self.stream = gateway, engine, path, stream
        self.session: Session = gateway.open_session("test", seed=1, temperature=1.0, max_new_tokens=50)

    def request(self, *headers: tuple[str, str]) -> RawRequest:
        body = json.dumps({**ROUTES[self.path], "stream": self.stream}).encode()
        key = ("Authorization", f"Bearer {self.session.key}")
        return RawRequest(path=self.path, headers=(key, *headers), body=body)

    @property
    def port(self) -> int:
        return int(self.gateway.root_url.rsplit(":", 1)[1])

    async def ask(self, *headers: tuple[str, str]) -> RawAnswer:
        answer = await exchange(self.port, self.request(*headers))
        assert answer is not None
        return answer

    async def hang_up(self) -> None:
        """Ask, and be gone before there is an answer."""
        self.engine.hold = asyncio.Event()
        num_requests = len(self.engine.requests)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.request().data())
        await until(lambda: len(self.engine.requests) > num_requests)
        writer.transport.abort()
        await until_noticed(self.gateway)
        del reader

    async def release(self) -> None:
        """Let the engine finish what it was asked."""
        assert self.engine.hold is not None
        self.engine.hold.set()
        await until_sampled(self.gateway)

    async def outlast_grace(self) -> None:
        """Simulate that enough time has passed for no client to retry."""
        loop = asyncio.get_running_loop()
        now = loop.time
        setattr(loop, "time", lambda: now() + GRACE_S)  # noqa: B010 - no type allows it
        await asyncio.sleep(0.01)  # what was due before this is over

    def close(self) -> Recording:
        return self.gateway.close_session(self.session)


@asynccontextmanager
async def serving(engine: FakeEngine, path: str, *, stream: bool) -> AsyncIterator[Client]:
    gateway = Gateway(TokenSessions(engine, tiny_renderer()), "policy", timeouts=Timeouts(retry_grace_s=GRACE_S))
    await gateway.start()
    yield Client(gateway, engine, path, stream=stream)
    await gateway.close()


everywhere = pytest.mark.parametrize(("path", "stream"), [*product(ROUTES, (False, True))])


def outcome(engine: FakeEngine, recording: Recording) -> tuple[int, int, int, int]:
    """Calls sampled, calls joined, segments, tokens trained."""
    return (
        len(engine.requests),
        recording.stats.get("joined_retries", 0),
        len(recording.segments),
        recording.stats["trained_tokens"],
    )


LS = Said("ls -l")


@everywhere
async def test_a_request_repeated_while_the_engine_works_gets_the_answer_under_way(path: str, stream: bool):
    async with serving(engine := FakeEngine([LS]), path, stream=stream) as client:
        await client.hang_up()
        second = asyncio.create_task(client.ask())
        await until(lambda: pending_calls(client.gateway)[0].num_waiting == 1)
        await client.release()
        answer = await second
        recording = client.close()
    assert answer.status == 200
    assert b"ls -l" in answer.body
    assert outcome(engine, recording) == (1, 1, 1, len(LS.ids()))
    assert recording.stats["undelivered"] == 0


@everywhere
@pytest.mark.parametrize("late", [False, True])
async def test_an_answer_that_was_finished_for_nobody_is_brought_to_whoever_asks_again(
    path: str, stream: bool, late: bool
):
    async with serving(engine := FakeEngine([LS]), path, stream=stream) as client:
        await client.hang_up()
        await client.release()
        if late:  # given up by then, and marked as lost
            await client.outlast_grace()
        answer = await client.ask()
        recording = client.close()
    assert b"ls -l" in answer.body
    assert outcome(engine, recording) == (1, 1, 1, len(LS.ids()))
    assert recording.stats["undelivered"] == 0


async def test_an_answer_that_nobody_asks_for_again_is_not_trained():
    async with serving(engine := FakeEngine([LS]), "/v1/messages", stream=True) as client:
        await client.hang_up()
        await client.release()
        await client.outlast_grace()
        recording = client.close()
    assert outcome(engine, recording) == (1, 0, 0, 0)
    assert recording.stats["undelivered"] == 1


@everywhere
async def test_a_request_repeated_after_its_answer_arrived_is_sampled_anew(path: str, stream: bool):
    async with serving(engine := FakeEngine([LS, Said("wc")]), path, stream=stream) as client:
        first, second = await client.ask(), await client.ask()
        recording = client.close()
    assert b"ls -l" in first.body
    assert b"wc" in second.body
    assert outcome(engine, recording) == (2, 0, 1, len(Said("wc").ids()))
    assert recording.stats["dropped_retries"] == 1


@everywhere
@pytest.mark.parametrize("header", [RETRY, ("x-stainless-retry-count", "2")])
async def test_a_request_that_says_it_is_a_retry_gets_the_same_answer(path: str, stream: bool, header: tuple[str, str]):
    async with serving(engine := FakeEngine([LS]), path, stream=stream) as client:
        answers = [await client.ask(), await client.ask(header)]
        recording = client.close()
    assert all(b"ls -l" in answer.body for answer in answers)
    assert outcome(engine, recording) == (1, 1, 1, len(LS.ids()))


async def test_an_idempotency_key_names_one_answer():
    async with serving(engine := FakeEngine([LS, Said("wc")]), "/v1/chat/completions", stream=False) as client:
        keys = ["a", "a", "b"]
        answers = [await client.ask(("Idempotency-Key", key)) for key in keys]
        recording = client.close()
    assert [b"ls -l" in answer.body for answer in answers] == [True, True, False]
    assert outcome(engine, recording)[:2] == (2, 1)


@everywhere
@pytest.mark.parametrize("headers", [(), (RETRY,)])
async def test_a_request_repeated_after_the_engine_failed_is_sampled_anew(
    path: str, stream: bool, headers: tuple[tuple[str, str], ...]
):
    async with serving(engine := FakeEngine([RuntimeError("gone"), LS]), path, stream=stream) as client:
        first, second = await client.ask(), await client.ask(*headers)
        recording = client.close()
    assert (first.status, second.status) == (502, 200)
    assert outcome(engine, recording) == (2, 0, 1, len(LS.ids()))


async def test_the_same_request_twice_at_once_is_two_calls_unless_one_says_it_is_a_retry():
    engine = FakeEngine([LS, Said("wc")], hold=asyncio.Event())
    async with serving(engine, "/v1/chat/completions", stream=False) as client:
        tasks = [asyncio.create_task(client.ask()) for _ in range(2)]
        await until(lambda: len(engine.requests) == 2)
        tasks.append(asyncio.create_task(client.ask(RETRY)))
        await until(lambda: sum(call.num_waiting for call in pending_calls(client.gateway)) == 2)
        await client.release()
        bodies = [(await task).body for task in tasks]
        recording = client.close()
    assert [b"ls -l" in body for body in bodies].count(True) + [b"wc" in body for body in bodies].count(True) == 3
    assert outcome(engine, recording)[:2] == (2, 1)


async def test_the_same_request_in_another_session_is_another_call():
    async with serving(engine := FakeEngine([LS, Said("wc")]), "/v1/chat/completions", stream=False) as client:
        await client.hang_up()
        await client.release()
        other = Client(client.gateway, engine, client.path, stream=False)
        answer = await other.ask(RETRY)
        recordings = [client.close(), other.close()]
    assert b"wc" in answer.body
    assert [recording.stats.get("joined_retries", 0) for recording in recordings] == [0, 0]


async def test_a_request_that_differs_in_one_byte_is_another_call():
    async with serving(engine := FakeEngine([LS, Said("wc")]), "/v1/chat/completions", stream=False) as client:
        await client.hang_up()
        await client.release()
        request = client.request(RETRY)
        answer = await exchange(client.port, replace(request, body=request.body + b" "))
        client.close()
    assert answer is not None
    assert b"wc" in answer.body
    assert len(engine.requests) == 2
