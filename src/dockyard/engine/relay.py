"""An engine on another machine, over connections that may drop and a server that may restart: both ends.

Every call has an id: the server (`RelayServer`) executes it once and returns its answer whenever it is requested. The
client (`Relay`) repeats what was lost. A server that has restarted is brought up to date before it gets another call.
"""

import asyncio
import hmac
import json
import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast
from uuid import uuid4

import aiohttp
import numpy as np
from aiohttp import web

from dockyard.engine.protocol import ContextOverflow, GenerateRequest, Generation
from dockyard.errors import DockyardError, EngineError
from dockyard.types import Finish, Json

logger = logging.getLogger(__name__)

BOOT_HEADER = "X-Dockyard-Boot"
"""The header with the id of the server process that a call is meant for."""
PENDING, FAILED, OTHER_BOOT = 202, 422, 410
_CALL_TIMEOUT = aiohttp.ClientTimeout(total=600, sock_connect=10, sock_read=90)
_MOST_BOOTS = 5
_HINT = "look at its log: its machine may have too little memory"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 2.0
_WAIT_S = 20.0
"""How long the server waits before it answers that a call is pending. Connections rarely drop so early."""
_LARGEST_BODY = 2**31
REMEMBERED = 256
"""The number of calls whose answers the server keeps, in case a response is lost."""

type RelayCall = Callable[[str, Json], Awaitable[Json]]
"""Makes a call: its kind and body; returns the answer."""
type Handler = Callable[[Json], Awaitable[Json]]
"""Executes a call of one kind: its body in, the answer out."""
type Find = Callable[[], Awaitable[str | None]]
"""Returns the server's address; None while it has none. Raises DockyardError if it will not come back."""


@dataclass(frozen=True, slots=True)
class _Link:
    url: str
    boot: str


class _LostError(Exception):
    """There was no answer, or one of another server process: the call is repeated."""


class Relay:
    """Calls to one server, wherever it is. It must be created inside an event loop."""

    def __init__(
        self, find: Find, token: str, *, patience_s: float, on_boot: Callable[[RelayCall], Awaitable[None]]
    ) -> None:
        """`on_boot` brings a new server process up to date; `patience_s` is how long it may be unreachable."""
        self._find = find
        self._patience_s = patience_s
        self._on_boot = on_boot
        self._link: _Link | None = None
        self._boot: str | None = None
        self._tried: set[str] = set()
        self._connecting = asyncio.Lock()
        self._heard = time.monotonic()
        self._failing_since: float | None = None
        self._down_s = 0.0
        self._cancels: set[asyncio.Task[None]] = set()
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"},
            timeout=_CALL_TIMEOUT,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
        )

    @property
    def down_s(self) -> float:
        """The total time in seconds in which it was unreachable."""
        return self._down_s + (time.monotonic() - self._failing_since if self._failing_since is not None else 0.0)

    async def call(self, kind: str, body: Json) -> Json:
        """Make a call and return the answer, however often the connection drops or the server restarts."""
        name = uuid4().hex
        boots: set[str] = set()
        while True:
            link = await self._connected()
            boots.add(link.boot)
            if len(boots) > _MOST_BOOTS:
                message = f"the policy's server restarted {_MOST_BOOTS} times before it answered one call (`{kind}`)"
                raise EngineError(message, hint=_HINT)
            try:
                return await self._ask(link, name, kind, body)
            except _LostError as error:
                self._lose(link, str(error))
            except asyncio.CancelledError:
                self._cancel(link, name)
                raise

    async def close(self) -> None:
        await asyncio.gather(*self._cancels)
        await self._session.close()

    async def _connected(self) -> _Link:
        async with self._connecting:
            if self._link is None:
                self._link = await self._connect()
            return self._link

    async def _connect(self) -> _Link:
        pause = _FIRST_PAUSE_S
        while True:
            try:
                if url := await self._find():
                    return await self._greet(url.rstrip("/"))
                failure = "it has no address yet"
            except _LostError as error:
                failure = str(error)
            if time.monotonic() + pause > self._heard + self._patience_s:
                raise EngineError(f"the policy is unreachable: {failure}", hint="see its log, then `--resume`")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _greet(self, url: str) -> _Link:
        status, answer = await self._send("GET", _Link(url, ""), "/boot")
        if status != 200 or "boot" not in answer:
            raise _LostError(f"HTTP {status}")
        link = _Link(url, str(answer["boot"]))
        if link.boot != self._boot:
            await self._bring_up(link)
        if self._failing_since is not None:
            logger.warning("the policy answers again")
            self._down_s, self._failing_since = self.down_s, None
        return link

    async def _bring_up(self, link: _Link) -> None:
        async def call(kind: str, body: Json) -> Json:
            return await self._ask(link, uuid4().hex, kind, body)

        self._tried.add(link.boot)
        if len(self._tried) > _MOST_BOOTS:
            message = f"the policy's server started {_MOST_BOOTS} times and ended each time before it was up to date"
            raise EngineError(message, hint=_HINT)
        await self._on_boot(call)
        self._boot = link.boot
        self._tried.clear()

    def _lose(self, link: _Link, failure: str) -> None:
        """Log the failure once, however many calls are waiting."""
        if self._link is not link:
            return
        self._link, self._heard = None, time.monotonic()
        if self._failing_since is None:
            logger.warning("the policy does not answer, retrying for %g s: %s", self._patience_s, failure)
            self._failing_since = time.monotonic()

    async def _ask(self, link: _Link, name: str, kind: str, body: Json) -> Json:
        status, answer = await self._send("POST", link, f"/calls/{name}", {"kind": kind, "body": body})
        while status == PENDING:
            self._heard = time.monotonic()
            status, answer = await self._send("GET", link, f"/calls/{name}")
        if status == FAILED:
            raise EngineError(str(answer["message"]), hint=str(answer["hint"]))
        if status == 401:
            raise EngineError(
                f"`{link.url}` rejects our token",
                hint="another run uses this address: start again",
            )
        if status != 200:  # tunnels have many ways to say that nothing is behind them
            raise _LostError(f"HTTP {status}")
        self._heard = time.monotonic()
        return answer

    async def _send(self, method: str, link: _Link, path: str, body: Json | None = None) -> tuple[int, Json]:
        headers = {BOOT_HEADER: link.boot} if link.boot else {}
        try:
            async with self._session.request(method, link.url + path, json=body, headers=headers) as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            raise _LostError(str(error) or type(error).__name__) from error
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):  # a page of some proxy
            return (response.status if response.status != 200 else 502), {}
        return response.status, cast(Json, answer)

    def _cancel(self, link: _Link, name: str) -> None:
        async def tell() -> None:
            try:
                await self._send("DELETE", link, f"/calls/{name}")
            except _LostError as error:  # the server is gone, or samples to the end in vain
                logger.debug("call %s could not be cancelled: %s", name, error)

        task = asyncio.create_task(tell())
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)


class RelayEngine:
    """Implements `Engine` over a relay. The server publishes its own weights, so none are sent."""

    def __init__(self, relay: Relay, *, context_length: int, version: int) -> None:
        self._relay = relay
        self._context_length = context_length
        self._version = version

    @classmethod
    async def open(cls, relay: Relay) -> Self:
        answer = await relay.call("describe", {})
        return cls(relay, context_length=answer["context_length"], version=answer["version"])

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def version(self) -> int:
        return self._version

    @property
    def down_s(self) -> float:
        return self._relay.down_s

    async def generate(self, request: GenerateRequest) -> Generation | ContextOverflow:
        return read_generation(await self._relay.call("generate", write_request(request)))

    async def publish(self, adapter_dir: Path, version: int) -> None:
        """Set the version only: the server serves it already."""
        self._version = version

    async def close(self) -> None:
        await self._relay.close()


def write_request(request: GenerateRequest) -> Json:
    """A request as JSON."""
    return {
        "prompt_ids": request.prompt_ids.tolist(),
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "stop_ids": sorted(request.stop_ids),
        "seed": request.seed,
        "version": request.version,
    }


def read_request(body: Json) -> GenerateRequest:
    """Read what `write_request` wrote."""
    return GenerateRequest(
        prompt_ids=np.array(body["prompt_ids"], np.int32),
        max_new_tokens=body["max_new_tokens"],
        temperature=body["temperature"],
        stop_ids=frozenset(body["stop_ids"]),
        seed=body["seed"],
        version=body["version"],
    )


def write_generation(found: Generation | ContextOverflow) -> Json:
    """A generation as JSON. Logprobs are preserved exactly."""
    if isinstance(found, ContextOverflow):
        return {"prompt_tokens": found.prompt_tokens, "context_length": found.context_length}
    return {
        "token_ids": found.token_ids.tolist(),
        "logprobs": found.logprobs.tolist(),
        "versions": found.versions.tolist(),
        "finish": found.finish.value,
    }


def read_generation(body: Json) -> Generation | ContextOverflow:
    """Read what `write_generation` wrote."""
    if "prompt_tokens" in body:
        return ContextOverflow(prompt_tokens=body["prompt_tokens"], context_length=body["context_length"])
    return Generation(
        token_ids=np.array(body["token_ids"], np.int32),
        logprobs=np.array(body["logprobs"], np.float32),
        versions=np.array(body["versions"], np.int32),
        finish=Finish(body["finish"]),
    )


class RelayServer:
    """The other end: one process of a server. It has no memory of calls to earlier processes.

    A response is sent before a connection is likely to drop, so the answer of a long call is requested several times.
    """

    def __init__(self, handlers: Mapping[str, Handler], token: str, *, wait_s: float = _WAIT_S) -> None:
        self.boot = secrets.token_hex(8)
        self._handlers = handlers
        self._token = token
        self._wait_s = wait_s
        self._calls: dict[str, asyncio.Task[Json]] = {}
        self._over: deque[str] = deque()
        self._runner: web.AppRunner | None = None
        self._heard = time.monotonic()

    async def start(self, listener: socket.socket) -> None:
        """Listen on this socket."""
        app = web.Application(middlewares=[self._guard], client_max_size=_LARGEST_BODY)
        app.router.add_get("/boot", self._report_boot)
        app.router.add_post("/calls/{name}", self._begin)
        app.router.add_get("/calls/{name}", self._report)
        app.router.add_delete("/calls/{name}", self._cancel)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    async def until_idle(self, idle_s: float) -> None:
        """Wait until no call has been in progress for `idle_s` seconds."""
        while (left := self._heard + idle_s - time.monotonic()) > 0:
            await asyncio.sleep(left)
            if any(not call.done() for call in self._calls.values()):
                self._heard = time.monotonic()

    async def close(self) -> None:
        for call in self._calls.values():
            call.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)
        if self._runner:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return web.json_response({"message": "wrong token"}, status=401)
        if request.headers.get(BOOT_HEADER, self.boot) != self.boot:
            return web.json_response({"boot": self.boot}, status=OTHER_BOOT)
        self._heard = time.monotonic()
        return await handler(request)

    async def _report_boot(self, _: web.Request) -> web.Response:
        return web.json_response({"boot": self.boot})

    async def _begin(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._calls:
            sent = await request.json()
            if name not in self._calls:  # a copy of the call may have arrived while this body was read
                self._calls[name] = call = asyncio.create_task(self._carry_out(sent["kind"], sent["body"]))
                call.add_done_callback(lambda _: self._remember(name))
        return await self._answer(self._calls[name])

    async def _report(self, request: web.Request) -> web.Response:
        call = self._calls.get(request.match_info["name"])
        return await self._answer(call) if call else web.json_response({}, status=404)

    async def _cancel(self, request: web.Request) -> web.Response:
        if call := self._calls.get(request.match_info["name"]):
            call.cancel()
        return web.json_response({})

    async def _carry_out(self, kind: str, body: Json) -> Json:
        if kind not in self._handlers:
            raise DockyardError(f"`{kind}` is not a known call", hint="both ends need the same version of dockyard")
        return await self._handlers[kind](body)

    async def _answer(self, call: asyncio.Task[Json]) -> web.Response:
        await asyncio.wait({call}, timeout=self._wait_s)
        if not call.done():
            return web.json_response({}, status=PENDING)
        if call.cancelled():  # this server is ending: the next one gets the call
            return web.json_response({}, status=503)
        match call.exception():
            case None:
                return web.json_response(call.result())
            case DockyardError() as error:
                return _failure(error.message, error.hint)
            case error:
                logger.error("a call failed", exc_info=error)
                return _failure(f"the policy's {type(error).__name__}: {error}", "its log says more")

    def _remember(self, name: str) -> None:
        """Forget the call that ended first."""
        self._over.append(name)
        if len(self._over) > REMEMBERED:
            del self._calls[self._over.popleft()]


def _failure(message: str, hint: str) -> web.Response:
    return web.json_response({"message": message, "hint": hint}, status=FAILED)
