"""A relay over loopback, through a proxy that can be cut, to servers that can be replaced."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from gateway_fakes import until

from dockyard.engine.protocol import ContextOverflow, GenerateRequest, Generation
from dockyard.engine.relay import (
    PENDING,
    REMEMBERED,
    Relay,
    RelayCall,
    RelayEngine,
    RelayServer,
    read_generation,
    read_request,
    write_generation,
    write_request,
)
from dockyard.errors import EngineError
from dockyard.types import Finish, Json

TOKEN = "open-sesame"


@dataclass
class Counter:
    """A server's work: counts how often each number was asked for."""

    asked: list[int] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: int = 0

    async def count(self, body: Json) -> Json:
        self.asked.append(body["n"])
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return {"n": body["n"]}

    async def describe(self, body: Json) -> Json:
        return {"context_length": 64, "version": 3}

    async def overflow(self, body: Json) -> Json:
        return write_generation(ContextOverflow(prompt_tokens=len(read_request(body).prompt_ids), context_length=64))

    async def fail(self, body: Json) -> Json:
        raise EngineError("the GPU is full", hint="take a larger one")

    async def crash(self, body: Json) -> Json:
        raise KeyError("x")


async def start(counter: Counter) -> tuple[RelayServer, str]:
    handlers = {
        "count": counter.count,
        "describe": counter.describe,
        "generate": counter.overflow,
        "fail": counter.fail,
        "crash": counter.crash,
    }
    server = RelayServer(handlers, TOKEN, wait_s=0.05)
    listener = socket.create_server(("127.0.0.1", 0))
    await server.start(listener)
    return server, f"http://127.0.0.1:{listener.getsockname()[1]}"


@dataclass
class Place:
    """Where the server is just now."""

    url: str | None = None
    boots: int = 0

    async def find(self) -> str | None:
        return self.url

    async def on_boot(self, call: RelayCall) -> None:
        self.boots += 1


@asynccontextmanager
async def relaying(place: Place, *, token: str = TOKEN, patience_s: float = 60) -> AsyncGenerator[Relay]:
    relay = Relay(place.find, token, patience_s=patience_s, on_boot=place.on_boot)
    try:
        yield relay
    finally:
        await relay.close()


class Wire:
    """A way to a server that can be cut: a proxy of bytes."""

    def __init__(self) -> None:
        self._writers: set[asyncio.StreamWriter] = set()
        self._target = 0

    async def start(self, target: str) -> str:
        self.lead_to(target)
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def lead_to(self, target: str) -> None:
        self._target = int(target.rpartition(":")[2])

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(4096):
                writer.write(data)
        except ConnectionError:
            pass
        writer.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        self.cut()
        self._server.close()
        await self._server.wait_closed()


async def test_a_call_is_carried_out_once_however_often_its_connection_is_cut():
    counter = Counter()
    server, url = await start(counter)
    wire = Wire()
    place = Place(await wire.start(url))
    async with relaying(place) as relay:
        calls = [asyncio.create_task(relay.call("count", {"n": n})) for n in range(5)]
        for _ in range(3):
            await until(lambda: len(counter.asked) == 5)
            wire.cut()
            await asyncio.sleep(0)
        counter.gate.set()
        answers = await asyncio.gather(*calls)
    await wire.close()
    await server.close()
    assert [answer["n"] for answer in answers] == list(range(5))
    assert sorted(counter.asked) == list(range(5))
    assert place.boots == 1


async def test_a_server_that_started_anew_is_brought_up_to_date_before_it_is_asked_again():
    first, second = Counter(), Counter()
    old, place = await start(first), Place()
    place.url = old[1]
    told: list[str] = []

    async def on_boot(call: RelayCall) -> None:
        await call("describe", {})
        told.append(f"after {len(first.asked)} calls of the first, {len(second.asked)} of the second")

    relay = Relay(place.find, TOKEN, patience_s=60, on_boot=on_boot)
    call = asyncio.create_task(relay.call("count", {"n": 7}))
    await until(lambda: first.asked == [7])
    await old[0].close()
    new = await start(second)
    second.gate.set()
    place.url = new[1]
    assert (await call)["n"] == 7
    assert told == [f"after {n} calls of the first, 0 of the second" for n in (0, 1)]
    assert second.asked == [7]
    assert relay.down_s > 0
    await relay.close()
    await new[0].close()


async def test_a_server_on_the_same_address_that_is_another_start_is_noticed():
    first, second = Counter(), Counter()
    first.gate.set()
    second.gate.set()
    (old, url), (new, other) = await start(first), await start(second)
    wire = Wire()
    place = Place(await wire.start(url))
    async with relaying(place) as relay:
        await relay.call("count", {"n": 1})
        wire.lead_to(other)
        wire.cut()
        await relay.call("count", {"n": 2})
    await wire.close()
    await old.close()
    await new.close()
    assert (first.asked, second.asked, place.boots) == ([1], [2], 2)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("fail", "the GPU is full"), ("crash", "the policy's KeyError: 'x'"), ("dance", "`dance` is not a known call")],
)
async def test_a_failure_over_there_is_told_here_with_its_hint(kind: str, message: str):
    server, url = await start(Counter())
    async with relaying(Place(url)) as relay:
        with pytest.raises(EngineError) as caught:
            await relay.call(kind, {})
    await server.close()
    assert caught.value.message == message
    assert caught.value.hint


async def test_without_the_token_nothing_is_told():
    server, url = await start(Counter())
    place = Place(url)
    async with relaying(place, token="guess", patience_s=0) as relay:
        with pytest.raises(EngineError):
            await relay.call("count", {"n": 1})
    await server.close()
    assert place.boots == 0


async def test_a_server_that_does_not_come_is_waited_for_only_so_long():
    async with relaying(Place(), patience_s=0) as relay:
        with pytest.raises(EngineError, match="the policy is unreachable: it has no address yet"):
            await relay.call("count", {"n": 1})


async def test_a_server_that_never_lasts_until_it_is_up_to_date_ends_the_run():
    servers: list[RelayServer] = []

    async def find() -> str:
        server, url = await start(Counter())
        servers.append(server)
        return url

    async def on_boot(call: RelayCall) -> None:
        await servers[-1].close()
        await call("describe", {})

    relay = Relay(find, TOKEN, patience_s=60, on_boot=on_boot)
    with pytest.raises(EngineError, match="the policy's server started 5 times and ended each time"):
        await relay.call("count", {"n": 1})
    await relay.close()
    await servers[-1].close()


async def test_a_call_that_ends_its_server_each_time_ends_the_run():
    counters: list[Counter] = []
    servers: list[RelayServer] = []

    async def find() -> str:
        counters.append(Counter())
        server, url = await start(counters[-1])
        servers.append(server)
        return url

    async def on_boot(call: RelayCall) -> None: ...

    relay = Relay(find, TOKEN, patience_s=60, on_boot=on_boot)
    call = asyncio.create_task(relay.call("count", {"n": 1}))
    for number in range(1, 6):
        await until(lambda number=number: len(servers) == number and counters[-1].asked == [1])
        await servers[-1].close()
    with pytest.raises(EngineError, match="server restarted 5 times before it answered one call"):
        await call
    await relay.close()
    await servers[-1].close()


async def test_all_calls_that_wait_for_a_server_give_up_at_the_same_time():
    looked = 0

    async def find() -> None:
        nonlocal looked
        looked += 1

    relay = Relay(find, TOKEN, patience_s=1, on_boot=Place().on_boot)
    calls = await asyncio.gather(*(relay.call("count", {"n": n}) for n in range(50)), return_exceptions=True)
    await relay.close()
    assert all(isinstance(failure, EngineError) for failure in calls)
    assert looked <= 3 + 49  # only the first had time to look again


async def test_what_took_long_is_told_however_much_was_asked_for_meanwhile():
    counter = Counter()
    server, url = await start(counter)
    describe = {"kind": "describe", "body": {}}
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        assert (await client.post("/calls/long", json={"kind": "count", "body": {"n": 1}})).status == PENDING
        for number in range(REMEMBERED + 1):
            await client.post(f"/calls/{number}", json=describe)
        counter.gate.set()
        await client.post("/calls/last", json=describe)
        assert (await client.get("/calls/long")).status == 200
        assert (await client.get("/calls/0")).status == 404
    await server.close()
    assert counter.asked == [1]


async def test_a_cancelled_call_is_cancelled_over_there():
    counter = Counter()
    server, url = await start(counter)
    async with relaying(Place(url)) as relay:
        call = asyncio.create_task(relay.call("count", {"n": 1}))
        await until(lambda: counter.asked == [1])
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: counter.cancelled == 1)
    await server.close()


async def test_a_server_ends_when_nobody_asks_but_not_while_it_works():
    counter = Counter()
    server, url = await start(counter)
    async with relaying(Place(url)) as relay:
        call = asyncio.create_task(relay.call("count", {"n": 1}))
        await until(lambda: counter.asked == [1])
        idle = asyncio.create_task(server.until_idle(0.2))
        await asyncio.sleep(0.5)
        assert not idle.done()
        counter.gate.set()
        await call
        await idle
    await server.close()


async def test_the_engine_says_what_the_server_says(tmp_path: Path):
    server, url = await start(Counter())
    async with relaying(Place(url)) as relay:
        engine = await RelayEngine.open(relay)
        assert (engine.context_length, engine.version, engine.down_s) == (64, 3, 0.0)
        await engine.publish(tmp_path, 4)
        assert engine.version == 4
        assert await engine.generate(request()) == ContextOverflow(prompt_tokens=3, context_length=64)
    await server.close()


def request() -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=np.array([5, 6, 7], np.int32),
        max_new_tokens=9,
        temperature=0.7,
        stop_ids=frozenset({2, 1}),
        seed=2**62 + 1,
        version=4,
    )


def test_requests_and_generations_return_to_the_bit():
    sent = read_request(write_request(request()))
    assert write_request(sent) == write_request(request())
    assert sent.prompt_ids.dtype == np.int32
    logprobs = np.random.default_rng(0).normal(size=50).astype(np.float32)
    generation = Generation(
        token_ids=np.arange(50, dtype=np.int32),
        logprobs=logprobs,
        versions=np.full(50, 3, np.int32),
        finish=Finish.STOP,
    )
    back = read_generation(write_generation(generation))
    assert isinstance(back, Generation)
    assert back.logprobs.tobytes() == logprobs.tobytes()
    assert back.versions.dtype == back.token_ids.dtype == np.int32
    assert back.finish is Finish.STOP
