"""The server of a relay: it executes each call once and returns its answer whenever it is requested.

A response is sent before a connection is likely to drop, so the answer of a long call is requested several times.
"""

import asyncio
import hmac
import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from dockyard.engine.relay import BOOT_HEADER, FAILED, OTHER_BOOT, PENDING
from dockyard.errors import DockyardError
from dockyard.types import Json

logger = logging.getLogger(__name__)

type Handler = Callable[[Json], Awaitable[Json]]

_WAIT_S = 20.0
_LARGEST_BODY = 2**31
REMEMBERED = 256
"""The number of calls whose answers are kept, in case a response is lost."""


class RelayServer:
    """One process of a server. It has no memory of calls to earlier processes."""

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
        app.router.add_get("/boot", self._tell_boot)
        app.router.add_post("/calls/{name}", self._begin)
        app.router.add_get("/calls/{name}", self._tell)
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

    async def _tell_boot(self, _: web.Request) -> web.Response:
        return web.json_response({"boot": self.boot})

    async def _begin(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._calls:
            sent = await request.json()
            if name not in self._calls:  # a copy of the call may have arrived while this body was read
                self._calls[name] = call = asyncio.create_task(self._carry_out(sent["kind"], sent["body"]))
                call.add_done_callback(lambda _: self._remember(name))
        return await self._answer(self._calls[name])

    async def _tell(self, request: web.Request) -> web.Response:
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
