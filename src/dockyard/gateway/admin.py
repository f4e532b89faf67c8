"""The admin listener, with which an external trainer controls a server: sessions, adapters, statistics.

It is separate from the agents' port and has its own token, so that a policy that reads its agent's key cannot reach
its record. No route lists sessions, and a key is returned only once.
"""

import asyncio
import hmac
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from dockyard.chat_format import exchange_json
from dockyard.errors import DockyardError
from dockyard.gateway.accounting import Recording, SessionLimits, unknown_key
from dockyard.gateway.protocol import RefusedError, dump, openai_error, validate
from dockyard.gateway.server import Gateway, Handler, add_route, refuse_other_routes
from dockyard.gateway.sessions import Session
from dockyard.types import Json, Segment

MAX_SESSIONS = 4096
"""Sessions open at the same time. A trainer that never closes its sessions gets an error before memory is full."""

type Publish = Callable[[Path, int], Awaitable[None]]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _Limits(_Wire):
    max_calls: int | None = Field(default=None, ge=1)
    max_sampled_tokens: int | None = Field(default=None, ge=1)
    max_seconds: float | None = Field(default=None, gt=0)
    max_concurrency: int = Field(default=8, ge=1)
    max_waiting: int = Field(default=64, ge=0)


class _SessionBody(_Wire):
    label: str = Field(default="session", pattern=r"^[A-Za-z0-9._-]{1,128}$")
    seed: int = Field(default_factory=lambda: secrets.randbits(32))
    temperature: float = Field(default=1.0, ge=0, le=2)
    max_new_tokens: int | None = Field(default=None, ge=1)
    limits: _Limits = _Limits()


class _AdapterBody(_Wire):
    path: Path
    version: int = Field(ge=0, lt=2**31)


class Admin:
    """Serves `POST /sessions`, `POST /sessions/ID/close`, `POST /adapter` and `GET /stats`."""

    def __init__(
        self, gateway: Gateway, token: str, *, publish: Publish | None, describe: Callable[[], Json] = dict[str, Any]
    ) -> None:
        """`publish` is None if the weights cannot be changed. `describe` returns additional statistics."""
        self._gateway = gateway
        self._token = token.encode()
        self._publish = publish
        self._describe = describe
        self._sessions: dict[str, Session] = {}
        self._totals: Counter[str] = Counter()
        self._num_closed = 0
        self._version = 0
        self._publishing = asyncio.Lock()
        self._started = time.monotonic()
        self._runner: web.AppRunner | None = None
        self._socket: Path | None = None

    async def start_port(self, port: int) -> str:
        """Listen on the loopback interface only. Port 0 takes a free one. Returns the URL."""
        runner = await self._set_up()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def start_socket(self, path: Path) -> str:
        """Listen on a Unix socket that only this user can open. Returns the URL."""
        runner = await self._set_up()
        before = os.umask(0o177)
        try:
            await web.UnixSite(runner, str(path)).start()
        finally:
            os.umask(before)
        self._socket = path
        return f"unix:{path}"

    async def close(self) -> None:
        """Stop listening. The sessions stay open until the gateway is closed."""
        if self._runner:
            await self._runner.cleanup()
        if self._socket:
            self._socket.unlink(missing_ok=True)

    async def _set_up(self) -> web.AppRunner:
        app = web.Application(middlewares=[self._guard])
        add_route(app.router, "POST", "/sessions", self._open_session)
        add_route(app.router, "POST", "/sessions/{id}/close", self._close_session)
        add_route(app.router, "POST", "/adapter", self._publish_adapter)
        add_route(app.router, "GET", "/stats", self._stats)
        refuse_other_routes(app.router)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=5)
        await self._runner.setup()
        return self._runner

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token first: without it every path gets the same answer, whether it exists or not."""
        try:
            self._check_token(request)
            return await handler(request)
        except RefusedError as error:
            refused = error
        except web.HTTPRequestEntityTooLarge:
            refused = RefusedError(413, "body_too_large", "the body is too large")
        return web.json_response(openai_error(refused), status=refused.status)

    def _check_token(self, request: web.Request) -> None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip().encode(errors="surrogateescape")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._token):
            raise unknown_key()

    async def _open_session(self, request: web.Request) -> web.Response:
        body = validate(_SessionBody, await _read(request))
        if len(self._sessions) >= MAX_SESSIONS:
            raise RefusedError(409, "too_many_sessions", f"{MAX_SESSIONS} sessions are open: close some first")
        session = self._gateway.open_session(
            body.label,
            seed=body.seed,
            temperature=body.temperature,
            max_new_tokens=body.max_new_tokens,
            limits=SessionLimits(**body.limits.model_dump()),
        )
        handle = secrets.token_urlsafe(16)
        self._sessions[handle] = session
        urls = {"openai_base_url": self._gateway.url, "anthropic_base_url": self._gateway.root_url}
        return web.json_response({"id": handle, "key": session.key, **urls})

    async def _close_session(self, request: web.Request) -> web.Response:
        session = self._sessions.pop(request.match_info["id"], None)
        if session is None:
            raise RefusedError(404, "unknown_session", "the session does not exist or is already closed")
        recording = self._gateway.close_session(session)
        self._num_closed += 1
        self._totals.update(recording.stats)
        data = await asyncio.to_thread(lambda: dump(recording_json(recording)))  # long lists take a while
        return web.Response(body=data, content_type="application/json")

    async def _publish_adapter(self, request: web.Request) -> web.Response:
        body = validate(_AdapterBody, await _read(request))
        if self._publish is None:
            raise RefusedError(400, "cannot_publish", "the endpoint behind this server cannot load new weights")
        if not _holds_adapter(body.path):
            raise RefusedError(400, "no_adapter", f"`{body.path}` has no `adapter_config.json`")
        try:
            async with self._publishing:
                await self._publish(body.path, body.version)
                self._version = body.version
        except DockyardError as error:
            raise RefusedError(502, "publish_failed", f"{error.message} ({error.hint})") from error
        return web.json_response({"version": body.version})

    async def _stats(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "uptime_s": round(time.monotonic() - self._started, 3),
                "version": self._version,
                "sessions": {"open": len(self._sessions), "closed": self._num_closed},
                "totals": dict(self._totals),
                **self._describe(),
            }
        )


async def _read(request: web.Request) -> object:
    try:
        return json.loads(await request.read() or b"{}")
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "invalid_request", f"the body is not JSON: {error}") from error
    except web.RequestPayloadError as error:
        raise RefusedError(400, "invalid_request", f"the body cannot be read: {error}") from error


def _holds_adapter(folder: Path) -> bool:
    return os.path.isfile(folder / "adapter_config.json")  # Path.is_file raises on a name that is too long


def recording_json(recording: Recording) -> Json:
    """Convert a recording to JSON. The token arrays of a segment are lists of equal length."""
    return {
        "segments": [_segment(segment) for segment in recording.segments],
        "untrusted": [_segment(segment) for segment in recording.untrusted],
        "exchanges": [exchange_json(exchange) for exchange in recording.exchanges],
        "stats": recording.stats,
        "calls": recording.calls,
        "answered": recording.answered,
        "engine_failure": recording.engine_failure,
        "overflow": recording.overflow,
        "limit": recording.limit,
        "misuse": recording.misuse,
    }


def _segment(segment: Segment) -> Json:
    return {
        "token_ids": segment.token_ids.tolist(),
        "sampled": segment.sampled.tolist(),
        "logprobs": None if segment.logprobs is None else segment.logprobs.tolist(),
        "versions": None if segment.versions is None else segment.versions.tolist(),
    }
