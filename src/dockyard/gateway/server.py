"""The gateway's HTTP server: routes, keys and streams. The wire formats are in `dialects`.

A key gives access to the model routes of one session only. No route lists, reads or ends a session.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from dockyard.gateway.accounting import Recording, SessionLimits, unknown_key
from dockyard.gateway.dialects import ROUTES
from dockyard.gateway.protocol import (
    NO_CLIENT_SAMPLING,
    AdvertisedModel,
    ClientSampling,
    Dialect,
    ModelReply,
    ModelRequest,
    RefusedError,
    openai_error,
)
from dockyard.gateway.retries import PendingCall, RecentCalls
from dockyard.gateway.sessions import Sampling, Session, SessionFactory
from dockyard.types import Json

BODY_LIMIT = 16 * 2**20
"""The largest body of a request, in bytes."""

type Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
type ReadSampling = Callable[[object], ClientSampling]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the server waits."""

    keep_alive_s: float = 10.0
    """Between keep-alive events on a stream while the engine samples."""
    retry_grace_s: float = 3.0
    """For the retry of a client that disconnected, before its call is dropped."""
    transfer_s: float = 60.0
    """For a client to send its body, and to read its response."""


@dataclass(frozen=True, slots=True)
class _Client:
    """A session with what the server keeps about it."""

    session: Session
    calls: RecentCalls
    read_sampling: ReadSampling
    """Reads the sampling parameters of a body that the session uses."""


class Gateway:
    """Serves one policy to many sessions."""

    def __init__(self, sessions: SessionFactory, model_name: str, *, timeouts: Timeouts | None = None) -> None:
        self._sessions = sessions
        self._model_name = model_name
        self._timeouts = timeouts or Timeouts()
        self._clients: dict[bytes, _Client] = {}
        self._default_client: _Client | None = None
        self._runner: web.AppRunner | None = None
        self._root: str | None = None

    @property
    def root_url(self) -> str:
        """The base URL for Anthropic clients."""
        assert self._root is not None, "call start() first"
        return self._root

    @property
    def url(self) -> str:
        """The base URL for OpenAI clients."""
        return f"{self.root_url}/v1"

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return URL(self.root_url).port or 80

    async def start(self, host: str = "127.0.0.1", port: int = 0, *, also: Sequence[str] = ()) -> None:
        """Listen on this host and, with the same port, on the hosts in `also`. Port 0 takes a free one."""
        app = web.Application(client_max_size=BODY_LIMIT)
        for prefix in ("", "/s/{label}"):
            self._add_routes(app.router, prefix)
        refuse_other_routes(app.router)
        # Without handler_cancellation a call would continue to sample for an agent that has disconnected.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=5, logger=_http_log()
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self._root = str(URL.build(scheme="http", host=host, port=self._runner.addresses[0][1]))
        for other in also:
            await web.TCPSite(self._runner, other, self.port).start()

    def open_session(
        self,
        label: str,
        *,
        seed: int,
        temperature: float,
        max_new_tokens: int | None,
        limits: SessionLimits | None = None,
    ) -> Session:
        """Open a session with a new key. `label` is for logs, and for agents that use the URL `/s/<label>`."""
        sampling = Sampling(seed=seed, temperature=temperature, max_new_tokens=max_new_tokens)
        session = self.new_session(label, sampling, limits or SessionLimits())
        self.host(session)
        return session

    def new_session(self, label: str, sampling: Sampling, limits: SessionLimits) -> Session:
        """Create a session that is not served yet."""
        return self._sessions.new_session(label, sampling, limits)

    def host(self, session: Session, read_sampling: ReadSampling | None = None, *, for_any_key: bool = False) -> None:
        """Serve a session under its key. With `for_any_key`, also under every key that no session has.

        Without `read_sampling` the sampling parameters of requests are ignored.
        """
        calls = RecentCalls(session.mark_delivered, self._timeouts.retry_grace_s)
        client = _Client(session, calls, read_sampling or (lambda _: NO_CLIENT_SAMPLING))
        self._clients[_digest(session.key)] = client
        if for_any_key:
            self._default_client = client

    def close_session(self, session: Session) -> Recording:
        """Revoke the key, cancel calls in progress, and return the record."""
        client = self._clients.pop(_digest(session.key), None)
        if client:  # already removed if the gateway was closed first
            client.calls.close()
        return session.close()

    async def close(self) -> None:
        """End every session and stop listening."""
        for client in list(self._clients.values()):
            self.close_session(client.session)
        if self._runner:
            await self._runner.cleanup()

    def _add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        served = AdvertisedModel(self._model_name, self._sessions.token_text)
        add = partial(add_route, router)
        for route in ROUTES:
            serve = _count_tokens if route.counts_tokens else self._sample
            add("POST", prefix + route.path, self._handler(route.dialect(served), serve))
        add("GET", f"{prefix}/v1/models", self._models)
        for probed in ("", "/", "/api/hello"):  # agents probe whether the server is up
            for method in ("GET", "HEAD"):
                if prefix + probed:
                    add(method, prefix + probed, _hello)

    def _handler(self, dialect: Dialect, serve: "Serve") -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                client = self._client(request)
                return await serve(request, client, await self._parse(request, client, dialect))
            except RecursionError:
                refused = RefusedError(400, "invalid_request", "the body is nested too deeply")
            except RefusedError as error:
                refused = error
            return web.json_response(dialect.error(refused), status=refused.status)

        return handle

    async def _parse(self, request: web.Request, client: _Client, dialect: Dialect) -> "_ParsedCall":
        raw = await _read_body(request, self._timeouts.transfer_s)
        started = time.thread_time()
        try:
            body = _parse_body(raw)
            self._check_model(body, client.session)
            head = f"{request.path}\n{request.headers.get('Idempotency-Key', '')}\n".encode(errors="replace")
            return _ParsedCall(dialect.parse(body), sha256(head + raw).digest(), client.read_sampling(body))
        finally:
            client.session.count("cpu_us", round((time.thread_time() - started) * 1e6))

    def _check_model(self, body: object, session: Session) -> None:
        """Refuse requests for another model: the policy would be trained on replies that were not meant for it."""
        model = cast("Json", body).get("model") if isinstance(body, dict) else None
        if not isinstance(model, str) or model.removesuffix("[1m]").split("/")[-1] == self._model_name.split("/")[-1]:
            return
        message = f"the model `{model}` is not served here: set the agent's model to `{self._model_name}`"
        refused = RefusedError(404, "model_not_found", message)
        session.note_misuse(refused)
        raise refused

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._client(request)
        except RefusedError as refused:
            return web.json_response(openai_error(refused), status=refused.status)
        model: Json = {
            "id": self._model_name,
            "object": "model",
            "type": "model",
            "display_name": self._model_name,
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "dockyard",
        }
        if (context_length := self._sessions.context_length) is not None:
            model["max_model_len"] = context_length
        return web.json_response({"object": "list", "data": [model], "has_more": False})

    def _client(self, request: web.Request) -> _Client:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        # By digest, so that the time of a lookup reveals nothing about a key.
        client = self._clients.get(_digest(key.strip()), self._default_client)
        label = request.match_info.get("label")
        if client is None or label not in (None, client.session.label):
            raise unknown_key()
        return client

    async def _sample(self, request: web.Request, client: _Client, parsed: "_ParsedCall") -> web.StreamResponse:
        asked = parsed.request
        call = client.calls.find(parsed.digest, is_retry=_is_retry(request))
        if call is None:
            task = client.session.submit(asked.prompt, asked.max_tokens, parsed.sampling)
            call = client.calls.start(parsed.digest, task)
        else:
            client.session.count("joined_retries")
        with client.calls.delivering(call):
            send = self._send_stream if asked.stream else self._send_body
            return await send(request, asked, call)

    async def _send_body(self, request: web.Request, asked: ModelRequest, call: PendingCall) -> web.StreamResponse:
        await asyncio.wait({call.task})
        response = web.json_response(asked.body(_outcome(call)))
        async with _reading_within(self._timeouts.transfer_s):
            await response.prepare(request)
            await response.write_eof()
        return response

    async def _send_stream(self, request: web.Request, asked: ModelRequest, call: PendingCall) -> web.StreamResponse:
        """Send nothing before the first keep-alive or the reply, so that most errors can still be HTTP errors."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        while not (await asyncio.wait({call.task}, timeout=self._timeouts.keep_alive_s))[0]:
            opening = b"" if response.prepared else asked.begin()
            await self._write(request, response, opening + asked.keep_alive())
        try:
            reply = _outcome(call)
            events = asked.events(reply) if response.prepared else asked.begin(reply) + asked.events(reply)
        except RefusedError as refused:
            if not response.prepared:
                raise
            events = asked.error_event(refused)
        await self._write(request, response, events)
        return response

    async def _write(self, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        async with _reading_within(self._timeouts.transfer_s):
            await response.prepare(request)
            await response.write(data)


type Serve = Callable[[web.Request, _Client, _ParsedCall], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class _ParsedCall:
    request: ModelRequest
    digest: bytes
    """Of route and body. The same bytes may be a retry of the same call."""
    sampling: ClientSampling


async def _count_tokens(_: web.Request, client: _Client, parsed: _ParsedCall) -> web.StreamResponse:
    return web.json_response({"input_tokens": await client.session.count_tokens(parsed.request.prompt)})


async def _hello(_: web.Request) -> web.Response:
    return web.json_response({})


@asynccontextmanager
async def _reading_within(seconds: float) -> AsyncGenerator[None]:
    """Treat a client that does not read its response in time as disconnected."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise ConnectionResetError("the client does not read its response") from error


def _is_retry(request: web.Request) -> bool:
    """Whether the client marks the request as a retry."""
    return request.headers.get("x-stainless-retry-count", "0") != "0" or "Idempotency-Key" in request.headers


def _outcome(call: PendingCall) -> ModelReply:
    if call.task.cancelled():  # the session was closed meanwhile
        raise unknown_key()
    return call.task.result()


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogateescape")).digest()


def refuse_other_routes(router: web.UrlDispatcher) -> None:
    """Answer 404 to every method and target that has no route. Call it after the routes are added."""
    every = _EveryTarget("/{other}")
    every.add_route("*", _no_such_route, expect_handler=_meet_expectations)
    router.register_resource(every)


class _EveryTarget(web.DynamicResource):
    """Matches every target, also one that is not a path, such as `*`."""

    def _match(self, path: str) -> dict[str, str]:
        return {}


async def _no_such_route(_: web.Request) -> web.Response:
    return web.json_response(openai_error(RefusedError(404, "not_found", "no such route")), status=404)


def add_route(router: web.UrlDispatcher, method: str, path: str, handler: Handler) -> None:
    """Add a route that no request header can make fail."""
    router.add_route(method, path, handler, expect_handler=_meet_expectations)


async def _meet_expectations(request: web.Request) -> None:
    """Replaces aiohttp's handler, which answers 500 to an `Expect` header that is not text."""
    if request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the response itself has not begun


async def _read_body(request: web.Request, timeout_s: float) -> bytearray:
    """Read the whole body. Raises `RefusedError` if it is too large, incomplete or too slow."""
    body = bytearray()
    too_large = RefusedError(413, "body_too_large", f"the body is larger than {BODY_LIMIT} bytes")
    if (request.content_length or 0) > BODY_LIMIT:
        raise too_large
    try:
        async with asyncio.timeout(timeout_s):
            # Not `request.read()`, which keeps the body in memory until the connection's next request.
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > BODY_LIMIT:
                    raise too_large
    except TimeoutError as error:
        raise RefusedError(408, "timeout", "the body did not arrive in time") from error
    except web.RequestPayloadError as error:
        raise RefusedError(400, "invalid_request", f"the body cannot be read: {error}") from error
    return body


def _parse_body(raw: bytearray) -> object:
    """Parse a body. Half a surrogate pair, which agents send for bytes that are not text, becomes a question mark."""
    text = raw.decode(errors="replace")
    try:
        value = json.loads(text)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "invalid_request", f"the body is not JSON: {error}") from error
    return value


def _http_log() -> logging.Logger:
    """aiohttp's log without errors that clients cause: they could fill it with tracebacks."""
    http_log = logging.getLogger(f"{__name__}.http")
    http_log.addFilter(_is_not_the_clients_fault)
    return http_log


def _is_not_the_clients_fault(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)
