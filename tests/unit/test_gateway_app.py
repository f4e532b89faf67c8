"""The gateway over HTTP, as an agent meets it."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from gateway_fakes import FakeEngine, Said, tiny, tiny_renderer, until, until_noticed, until_sampled

from dockyard.engine.protocol import ContextOverflow, GenerateRequest, Generation
from dockyard.gateway.accounting import Recording, SessionLimits, unknown_key
from dockyard.gateway.dialects import ROUTES, DialectRoute
from dockyard.gateway.protocol import AdvertisedModel
from dockyard.gateway.server import BODY_LIMIT, Gateway, Timeouts
from dockyard.gateway.sessions import Session, TokenSessions
from dockyard.types import Finish

USER = {"role": "user", "content": "count the lines"}


class Client:
    """One agent and its session."""

    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession, **limits: Any) -> None:
        sampling = {"seed": 1, "temperature": 1.0, "max_new_tokens": 50} | limits
        self.gateway, self.http = gateway, http
        self.session: Session = gateway.open_session("test", **sampling)

    def post(self, *messages: dict[str, Any], key: str | None = None, **fields: Any):
        headers = {"Authorization": f"Bearer {key or self.session.key}"}
        return self.http.post(
            f"{self.gateway.url}/chat/completions", json={"messages": messages, **fields}, headers=headers
        )

    async def ask(self, *messages: dict[str, Any], **fields: Any) -> tuple[int, Any]:
        async with self.post(*messages, **fields) as response:
            return response.status, await response.json()

    async def say(self, *messages: dict[str, Any]) -> str:
        return (await self.ask(*messages))[1]["choices"][0]["message"]["content"]

    async def stream(self, first: int, then: asyncio.Event) -> tuple[int, list[str]]:
        """All events of a stream; when the first of them are there, `then` is set."""
        lines: list[str] = []
        async with self.post(USER, stream=True) as response:
            async for line in response.content:
                lines += [line.decode().strip().removeprefix("data: ")] if line.strip() else []
                if len(lines) == first:
                    then.set()
            return response.status, lines

    def close(self) -> Recording:
        return self.gateway.close_session(self.session)


@asynccontextmanager
async def serving(engine: FakeEngine, **timeouts: float) -> AsyncIterator[Callable[..., Client]]:
    sessions = TokenSessions(engine, tiny_renderer())
    gateway = Gateway(sessions, "policy", timeouts=Timeouts(**{"retry_grace_s": 0.01} | timeouts))
    await gateway.start()
    async with aiohttp.ClientSession() as http:
        yield lambda **limits: Client(gateway, http, **limits)
    await gateway.close()


@asynccontextmanager
async def one_client(engine: FakeEngine, **timeouts: float) -> AsyncIterator[Client]:
    async with serving(engine, **timeouts) as open_client:
        yield open_client()


def port_of(client: Client) -> int:
    return int(client.gateway.url.split(":")[2].split("/")[0])


async def test_a_conversation_over_http_is_one_segment():
    async with one_client(FakeEngine([Said("ls"), Said("wc -l")])) as client:
        first = await client.say(USER)
        again = [{"role": "assistant", "content": first}, {"role": "user", "content": "a.txt"}]
        second = await client.say(USER, *again)
        recording = client.close()
    assert (first, second) == ("ls", "wc -l")
    assert (len(recording.segments), recording.calls, recording.stats["splices"]) == (1, 2, 1)


async def test_token_ids_on_the_wire_are_those_the_engine_saw():
    async with one_client(engine := FakeEngine([Said("list", pieces=1)])) as client:
        _, body = await client.ask(USER, return_token_ids=True, logprobs=True)
    assert body["prompt_token_ids"] == engine.requests[0].prompt_ids.tolist()
    assert body["choices"][0]["token_ids"] == engine.generations[0].token_ids.tolist()
    assert [entry["logprob"] for entry in body["choices"][0]["logprobs"]["content"]] == [-1, -2, -3, -4, -5]


async def test_sampling_parameters_of_the_agent_are_overridden():
    async with one_client(engine := FakeEngine()) as client:
        status, _ = await client.ask(USER, temperature=0, seed=9, top_p=0.5, stop=["o"], max_tokens=9)
    assert (status, engine.requests[0].temperature, engine.requests[0].max_new_tokens) == (200, 1.0, 9)


async def test_a_stream_is_recorded_before_it_ends():
    async with one_client(FakeEngine([Said("ls")])) as client, client.post(USER, stream=True) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        async for line in response.content:
            if line.strip() == b"data: [DONE]":
                recording = client.close()
                break
        else:
            raise AssertionError("the stream did not end with [DONE]")
    assert len(recording.segments) == 1
    assert recording.stats["undelivered"] == 0


async def test_a_slow_engine_is_bridged_with_empty_chunks():
    engine = FakeEngine([Said("ls")], hold=asyncio.Event())
    assert engine.hold is not None
    async with one_client(engine, keep_alive_s=0.01) as client:
        status, lines = await client.stream(3, then=engine.hold)
    chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
    empty = [chunk for chunk in chunks if not chunk["delta"] and chunk["finish_reason"] is None]
    assert (status, lines[-1]) == (200, "[DONE]")
    assert len(empty) >= 2
    assert [chunk["delta"]["content"] for chunk in chunks if chunk["delta"]] == ["ls"]


async def test_missing_wrong_and_expired_keys_get_the_same_answer():
    async with serving(FakeEngine()) as open_client:
        client, closed = open_client(), open_client()
        closed.close()
        answers: list[tuple[int, str]] = []
        for headers in ({}, {"Authorization": "Bearer nonsense"}, {"Authorization": f"Bearer {closed.session.key}"}):
            for path, method in (("chat/completions", "POST"), ("models", "GET")):
                url = f"{client.gateway.url}/{path}"
                async with client.http.request(method, url, headers=headers, data=b"{") as response:
                    answers.append((response.status, await response.text()))
    assert len(set(answers)) == 1
    assert answers[0][0] == 401


@pytest.mark.parametrize("headers", [{"Authorization": "bearer {}"}, {"x-api-key": "{}"}])
async def test_the_model_list_says_how_long_the_context_is(headers: dict[str, str]):
    async with one_client(FakeEngine(context_length=123)) as client:
        filled = {name: value.format(client.session.key) for name, value in headers.items()}
        async with client.http.get(f"{client.gateway.url}/models", headers=filled) as response:
            [model] = (await response.json())["data"]
    assert (model["id"], model["max_model_len"]) == ("policy", 123)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/chat/completions"), ("POST", "/v1/models"), ("GET", "/s"), ("GET", "/v1/sessions"), ("PUT", "/v1")],
)
async def test_nothing_else_exists(method: str, path: str):
    async with one_client(FakeEngine()) as client:
        url = client.gateway.url.removesuffix("/v1") + path
        headers = {"Authorization": f"Bearer {client.session.key}"}
        async with client.http.request(method, url, headers=headers) as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "not_found"


@pytest.mark.parametrize("body", [b"{", b"\xff", b"", b"[" * 100_000])
async def test_a_body_that_is_not_json_is_refused(body: bytes):
    async with one_client(FakeEngine()) as client:
        headers = {"Authorization": f"Bearer {client.session.key}"}
        async with client.http.post(f"{client.gateway.url}/chat/completions", data=body, headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["message"].startswith("the body is not JSON")


async def announced(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 2**20 + 1):
        yield b" " * 2**20


async def test_a_body_past_the_limit_is_refused_whether_or_not_it_says_its_length():
    async with one_client(FakeEngine()) as client:
        url, headers = f"{client.gateway.url}/chat/completions", {"Authorization": f"Bearer {client.session.key}"}
        async with client.http.post(url, data=announced(BODY_LIMIT), headers=headers) as response:
            assert response.status == 413
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(client))
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY_LIMIT + 1}\r\n"
            f"Authorization: Bearer {client.session.key}\r\n\r\n".encode()
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()
        await writer.wait_closed()


async def test_a_key_that_is_no_text_is_an_unknown_key():
    async with one_client(FakeEngine()) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(client))
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("content", [rb"a\udcffb", rb"a\ud83db", b"a\xed\xa0\x80b", rb"\ud83d\ude00 a\uDC00b"])
async def test_half_a_character_in_a_message_is_served(content: bytes):
    async with one_client(FakeEngine([Said("ls")])) as client:
        headers = {"Authorization": f"Bearer {client.session.key}"}
        body = b'{"messages": [{"role": "user", "content": "' + content + b'"}]}'
        async with client.http.post(f"{client.gateway.url}/chat/completions", data=body, headers=headers) as response:
            assert response.status == 200


async def test_a_compressed_body_is_read():
    async with one_client(FakeEngine([Said("ls")])) as client:
        headers = {"Authorization": f"Bearer {client.session.key}", "Content-Encoding": "gzip"}
        body = gzip.compress(json.dumps({"messages": [USER]}).encode())
        async with client.http.post(f"{client.gateway.url}/chat/completions", data=body, headers=headers) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "ls"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_does_not_fit_is_a_400_that_agents_know(stream: bool):
    async with one_client(FakeEngine(context_length=10)) as client:
        status, body = await client.ask(USER, stream=stream)
        recording = client.close()
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert recording.overflow


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_failure_is_a_502_and_on_the_record(stream: bool):
    async with one_client(FakeEngine([RuntimeError("gone")])) as client:
        status, body = await client.ask(USER, stream=stream)
        recording = client.close()
    assert (status, body["error"]["code"]) == (502, "engine_failure")
    assert recording.engine_failure == "RuntimeError: gone"


@pytest.mark.parametrize("line", [RuntimeError("gone"), ContextOverflow(prompt_tokens=9, context_length=8)])
async def test_a_failure_after_the_stream_began_is_an_event(line: Exception | ContextOverflow):
    engine = FakeEngine([line], hold=asyncio.Event())
    assert engine.hold is not None
    async with one_client(engine, keep_alive_s=0.01) as client:
        status, lines = await client.stream(1, then=engine.hold)
    assert status == 200
    assert json.loads(lines[-1])["error"]["code"] in ("engine_failure", "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_hangs_up_stops_the_engine_and_is_not_trained(stream: bool):
    engine = FakeEngine(hold=asyncio.Event())
    async with one_client(engine) as client:
        task = asyncio.create_task(client.ask(USER, stream=stream))
        await until(lambda: len(engine.requests) == 1)
        task.cancel()
        await until(lambda: engine.num_cancelled == 1)
        recording = client.close()
    assert (recording.segments, recording.calls, recording.stats["aborted"]) == ((), 1, 1)


class Talkative(FakeEngine):
    """Says more than a socket's buffers hold."""

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        return self._draw([5] * 150_000, Finish.LENGTH)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_agent_does_not_take_is_not_trained(stream: bool):
    async with one_client(engine := Talkative()) as client:
        body = json.dumps({"messages": [USER], "stream": stream, "logprobs": True, "return_token_ids": True})
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(client), limit=1024)
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            f"Authorization: Bearer {client.session.key}\r\n\r\n{body}".encode()
        )
        await until(lambda: len(engine.generations) == 1)
        await until_sampled(client.gateway)
        writer.transport.abort()
        await until_noticed(client.gateway)
        await asyncio.sleep(0.5)  # the gateway may still be writing to a connection that it does not know to be closed
        recording = client.close()
    assert (recording.segments, recording.stats["undelivered"]) == ((), 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_closing_a_session_ends_its_calls_as_if_the_key_were_unknown(stream: bool):
    engine = FakeEngine(hold=asyncio.Event())
    async with one_client(engine) as client:
        task = asyncio.create_task(client.ask(USER, stream=stream))
        await until(lambda: len(engine.requests) == 1)
        client.close()
        status, _ = await task
    assert (status, engine.num_cancelled) == (401, 1)


async def test_closing_the_gateway_ends_calls_under_way():
    engine = FakeEngine(hold=asyncio.Event())
    async with one_client(engine) as client:
        task = asyncio.create_task(client.ask(USER))
        await until(lambda: len(engine.requests) == 1)
        await client.gateway.close()
        assert (await task)[0] == 401


async def test_two_sessions_at_once_do_not_mix():
    engine = FakeEngine([Said(f"turn {number}") for number in range(8)])
    async with serving(engine) as open_client:
        clients = [open_client(seed=1), open_client(seed=2)]

        async def converse(client: Client, words: str) -> None:
            history = [{"role": "user", "content": words}]
            for _ in range(4):
                reply = await client.say(*history)
                history += [{"role": "assistant", "content": reply}, {"role": "user", "content": words}]

        await asyncio.gather(*(converse(client, f"words of {n}") for n, client in enumerate(clients)))
        recordings = [client.close() for client in clients]
    assert [(len(recording.segments), recording.calls) for recording in recordings] == [(1, 4), (1, 4)]
    for number, recording in enumerate(recordings):
        text = tiny().decode(recording.segments[0].token_ids.tolist())
        assert text.count(f"words of {number}") == 4
        assert f"words of {1 - number}" not in text
    assert len({request.seed for request in engine.requests}) == 8


async def test_a_session_past_its_calls_is_refused():
    async with serving(FakeEngine()) as open_client:
        client = open_client(limits=SessionLimits(max_calls=1))
        answers = [await client.ask(USER) for _ in range(2)]
    assert [status for status, _ in answers] == [200, 403]
    assert answers[1][1]["error"]["code"] == "calls_limit_reached"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@pytest.mark.parametrize("prefix", ["", "/s/test"])
async def test_every_route_of_the_table_is_served_and_refuses_in_its_own_dialect(route: DialectRoute, prefix: str):
    dialect = route.dialect(AdvertisedModel("policy", str))
    async with one_client(FakeEngine()) as client:
        url = client.gateway.root_url + prefix + route.path
        async with client.http.post(url, json={}, headers={"x-api-key": "wrong"}) as response:
            assert (response.status, await response.json()) == (401, dialect.error(unknown_key()))
        async with client.http.post(url, json={}, headers={"x-api-key": client.session.key}) as response:
            assert response.status == 400
        async with client.http.get(url, headers={"x-api-key": client.session.key}) as response:
            assert response.status == 404
