"""The gateway's HTTP server: routes, keys, streams. What is said on them is the dialects' business.

A key is a capability for one session and for model routes only; nothing here lists, reads or ends a session.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from dockyard.engine.protocol import Engine
from dockyard.gateway.accounting import Recording, SessionLimits, unknown_key
from dockyard.gateway.dialects.chat import Chat, error_body
from dockyard.gateway.dialects.messages import Messages
from dockyard.gateway.dialects.responses import Responses
from dockyard.gateway.protocol import NO_WISHES, Call, ClientSampling, Dialect, RefusedError, Reply, Served
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.retries import Deliveries, Flight
from dockyard.gateway.sessions import AnySession, Sampling, Session
from dockyard.gateway.text_session import TextSession, TextSource

BODY_LIMIT = 16 * 2**20

type Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
type ReadWishes = Callable[[object], ClientSampling]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the server waits for what."""

    keep_alive_s: float = 10.0
    """Between signs of life on a stream while the engine works."""
    retry_grace_s: float = 3.0
    """For an agent that hung up to ask again, before its call is dropped."""
    transfer_s: float = 60.0
    """For a client to send its body, and to take its answer."""


@dataclass(frozen=True, slots=True)
class _Client:
    """A session as the server keeps it."""

    session: AnySession
    deliveries: Deliveries
    read_wishes: ReadWishes
    """What of a body's sampling parameters counts."""


class Gateway:
    """Serves one policy to many sessions."""

    def __init__(
        self,
        engine: Engine | TextSource,
        renderer: Renderer | None,
        model_name: str,
        *,
        patience: Patience | None = None,
    ) -> None:
        """`renderer` is None exactly where the engine is a source of text, which renders by itself."""
        self._engine = engine
        self._renderer = renderer
        self._model_name = model_name
        self._patience = patience or Patience()
        self._guests: dict[bytes, _Client] = {}
        self._anybody: _Client | None = None
        self._runner: web.AppRunner | None = None
        self._root: str | None = None

    @property
    def root_url(self) -> str:
        """What an Anthropic client is given as its base URL."""
        assert self._root is not None, "start() comes first"
        return self._root

    @property
    def url(self) -> str:
        """What an OpenAI client is given as its base URL."""
        return f"{self.root_url}/v1"

    @property
    def port(self) -> int:
        """Where it listens."""
        return URL(self.root_url).port or 80

    async def start(self, host: str = "127.0.0.1", port: int = 0, *, also: Sequence[str] = ()) -> None:
        """Listen on this host and, with the same port, on others; port 0 takes a free one."""
        app = web.Application(client_max_size=BODY_LIMIT)
        for prefix in ("", "/s/{label}"):
            self._add_routes(app.router, prefix)
        app.router.add_route("*", "/{other:.*}", _no_such_route, expect_handler=_meet_expectations)
        # Without handler_cancellation a call would go on sampling for an agent that has hung up.
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
    ) -> AnySession:
        """A new key for one rollout. `label` is for logs, and for agents told the URL `/s/<label>`."""
        sampling = Sampling(seed=seed, temperature=temperature, max_new_tokens=max_new_tokens)
        session = self.new_session(label, sampling, limits or SessionLimits())
        self.host(session)
        return session

    def new_session(self, label: str, sampling: Sampling, limits: SessionLimits) -> AnySession:
        """A session that no key leads to yet."""
        if isinstance(self._engine, TextSource):
            return TextSession(label, sampling, limits, self._engine)
        assert self._renderer is not None
        return Session(label, sampling, limits, self._engine, self._renderer)

    def host(self, session: AnySession, read_wishes: ReadWishes | None = None, *, for_anybody: bool = False) -> None:
        """Serve a session under its key; `for_anybody`, also under every key that no session has."""
        deliveries = Deliveries(session.mark_delivered, self._patience.retry_grace_s)
        guest = _Client(session, deliveries, read_wishes or _unheard)
        self._guests[_digest(session.key)] = guest
        if for_anybody:
            self._anybody = guest

    def close_session(self, session: AnySession) -> Recording:
        """Revoke the key, drop calls under way, and hand out the record."""
        guest = self._guests.pop(_digest(session.key), None)
        if guest:  # not there if the gateway was closed first
            guest.deliveries.settle()
        return session.close()

    async def close(self) -> None:
        """End every session and stop listening."""
        for guest in list(self._guests.values()):
            self.close_session(guest.session)
        if self._runner:
            await self._runner.cleanup()

    def _add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        served = Served(self._model_name, self._renderer.token_text if self._renderer else str)
        messages = Messages(served)
        add = partial(router.add_route, expect_handler=_meet_expectations)
        add("POST", f"{prefix}/v1/chat/completions", self._route(Chat(served), self._sample))
        add("POST", f"{prefix}/v1/messages", self._route(messages, self._sample))
        add("POST", f"{prefix}/v1/messages/count_tokens", self._route(messages, _count_tokens))
        add("POST", f"{prefix}/v1/responses", self._route(Responses(served), self._sample))
        add("GET", f"{prefix}/v1/models", self._models)
        for probed in ("", "/", "/api/hello"):  # agents look whether anybody is there
            for method in ("GET", "HEAD"):
                if prefix + probed:
                    add(method, prefix + probed, _hello)

    def _route(self, dialect: Dialect, serve: "Serve") -> Answer:
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                guest = self._guest(request)
                return await serve(request, guest, await self._parse(request, guest, dialect))
            except RecursionError:
                refused = RefusedError(400, "invalid_request", "the body is nested too deeply")
            except RefusedError as error:
                refused = error
            return web.json_response(dialect.error(refused), status=refused.status)

        return answer

    async def _parse(self, request: web.Request, guest: _Client, dialect: Dialect) -> "_Asked":
        raw = await self._read(request)
        with _counted_cpu(guest.session):
            body = _load_json(raw)
            self._check_model(body, guest.session)
            named = f"{request.path}\n{request.headers.get('Idempotency-Key', '')}\n".encode(errors="replace")
            return _Asked(dialect.parse(body), sha256(named + raw).digest(), guest.read_wishes(body))

    def _check_model(self, body: object, session: AnySession) -> None:
        """An agent that asks for another model would be trained on answers it did not mean to get from this one."""
        asked = cast("dict[str, Any]", body).get("model") if isinstance(body, dict) else None
        if not isinstance(asked, str) or asked.removesuffix("[1m]").split("/")[-1] == self._model_name.split("/")[-1]:
            return
        message = f"the model `{asked}` is not served here: set the agent's model to `{self._model_name}`"
        refused = RefusedError(404, "model_not_found", message)
        session.note_misuse(refused)
        raise refused

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._guest(request)
        except RefusedError as refused:
            return web.json_response(error_body(refused), status=refused.status)
        model = {
            "id": self._model_name,
            "object": "model",
            "type": "model",
            "display_name": self._model_name,
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "dockyard",
        }
        if not isinstance(self._engine, TextSource):
            model["max_model_len"] = self._engine.context_length
        return web.json_response({"object": "list", "data": [model], "has_more": False})

    def _guest(self, request: web.Request) -> _Client:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        guest = self._guests.get(
            _digest(key.strip()), self._anybody
        )  # by digest: a lookup's time tells nothing about a key
        label = request.match_info.get("label")
        if guest is None or label not in (None, guest.session.label):
            raise unknown_key()
        return guest

    async def _read(self, request: web.Request) -> bytearray:
        if (request.content_length or 0) > BODY_LIMIT:
            raise _too_large()
        try:
            async with asyncio.timeout(self._patience.transfer_s):
                return await _whole_body(request)
        except TimeoutError as error:
            raise RefusedError(408, "timeout", "the body did not arrive in time") from error
        except web.RequestPayloadError as error:
            raise RefusedError(400, "invalid_request", f"the body cannot be read: {error}") from error

    async def _sample(self, request: web.Request, guest: _Client, asked: "_Asked") -> web.StreamResponse:
        flight = guest.deliveries.find(asked.digest, is_retry=_is_retry(request))
        if flight is None:
            task = guest.session.submit(asked.call.prompt, asked.call.max_tokens, asked.wishes)
            flight = guest.deliveries.start(asked.digest, task)
        else:
            guest.session.count("joined_retries")
        with guest.deliveries.bringing(flight):
            send = self._stream if asked.call.stream else self._answer
            return await send(request, asked.call, flight)

    async def _answer(self, request: web.Request, call: Call, flight: Flight) -> web.StreamResponse:
        await asyncio.wait({flight.task})
        response = web.json_response(call.body(_outcome(flight)))
        with _impatience():
            async with asyncio.timeout(self._patience.transfer_s):
                await response.prepare(request)
                await response.write_eof()
        return response

    async def _stream(self, request: web.Request, call: Call, flight: Flight) -> web.StreamResponse:
        """Nothing is sent until there is something to say, so that most errors can still be HTTP errors."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        while not (await asyncio.wait({flight.task}, timeout=self._patience.keep_alive_s))[0]:
            opening = b"" if response.prepared else call.begin()
            await self._send(request, response, opening + call.keep_alive())
        try:
            reply = _outcome(flight)
            events = call.events(reply) if response.prepared else call.begin(reply) + call.events(reply)
        except RefusedError as refused:
            if not response.prepared:
                raise
            events = call.error_event(refused)
        await self._send(request, response, events)
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        with _impatience():
            async with asyncio.timeout(self._patience.transfer_s):
                await response.prepare(request)
                await response.write(data)


type Serve = Callable[[web.Request, _Client, _Asked], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class _Asked:
    call: Call
    digest: bytes
    """Of route and body: the same bytes again may be the same call again."""
    wishes: ClientSampling


async def _count_tokens(_: web.Request, guest: _Client, asked: _Asked) -> web.StreamResponse:
    return web.json_response({"input_tokens": await guest.session.count_tokens(asked.call.prompt)})


async def _hello(_: web.Request) -> web.Response:
    return web.json_response({})


@contextmanager
def _counted_cpu(session: AnySession) -> Generator[None, None, None]:
    started = time.thread_time()
    try:
        yield
    finally:
        session.count("cpu_us", round((time.thread_time() - started) * 1e6))


@contextmanager
def _impatience() -> Generator[None, None, None]:
    """A client that does not take its answer has as good as hung up."""
    try:
        yield
    except TimeoutError as error:
        raise ConnectionResetError("the client does not read") from error


def _is_retry(request: web.Request) -> bool:
    """Some clients say so themselves."""
    return request.headers.get("x-stainless-retry-count", "0") != "0" or "Idempotency-Key" in request.headers


def _outcome(flight: Flight) -> Reply:
    if flight.task.cancelled():  # the session was closed under it
        raise unknown_key()
    return flight.task.result()


def _unheard(_: object) -> ClientSampling:
    return NO_WISHES


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogateescape")).digest()


def _load_json(raw: bytes | bytearray) -> object:
    """Half a surrogate pair, as agents send for bytes that are no text, becomes a question mark."""
    text = raw.decode(errors="replace")
    try:
        value = json.loads(text)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "invalid_request", f"the body is not JSON: {error}") from error
    return value


async def _whole_body(request: web.Request) -> bytearray:
    """Not by `request.read()`, which keeps the body until the connection brings another."""
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > BODY_LIMIT:
            raise _too_large()
    return body


def _too_large() -> RefusedError:
    return RefusedError(413, "body_too_large", f"the body is larger than {BODY_LIMIT} bytes")


async def _no_such_route(_: web.Request) -> web.Response:
    """Whatever is not a model route does not exist, with any method."""
    return web.json_response(error_body(RefusedError(404, "not_found", "no such route")), status=404)


async def _meet_expectations(request: web.Request) -> None:
    """Not aiohttp's own, which answers 500 to an `Expect` header that is no text."""
    if request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # an answer has not begun with that


def _http_log() -> logging.Logger:
    """aiohttp's log without what clients did wrong, who could fill it with tracebacks."""
    http_log = logging.getLogger(f"{__name__}.http")
    http_log.addFilter(_is_no_clients_fault)
    return http_log


def _is_no_clients_fault(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)
