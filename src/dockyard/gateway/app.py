"""The gateway's HTTP server: routes, keys, streams. What is said on them is the dialects' business.

A key is a capability for one session and for model routes only; nothing here lists, reads or ends a session.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, Protocol

from aiohttp import web

from dockyard.engine import Engine
from dockyard.gateway.chat import Chat, error_body
from dockyard.gateway.forest import Message
from dockyard.gateway.render import Renderer
from dockyard.gateway.sessions import Recording, RefusedError, Reply, Sampling, Session, unknown_key

BODY_LIMIT = 64 * 2**20
KEEP_ALIVE_S = 10.0

type Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Call(Protocol):
    """One parsed request: what to sample, and how to say the answer in its dialect."""

    @property
    def messages(self) -> Sequence[Message]: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def stream(self) -> bool: ...
    def body(self, reply: Reply) -> dict[str, Any]: ...
    def events(self, reply: Reply) -> bytes: ...
    def keep_alive(self) -> bytes: ...
    def error_event(self, refused: RefusedError) -> bytes: ...


class Dialect(Protocol):
    """A wire format. Translates, and decides nothing."""

    def parse(self, body: object) -> Call: ...
    def error(self, refused: RefusedError) -> dict[str, Any]: ...


class Gateway:
    """Serves one policy to many sessions."""

    def __init__(
        self, engine: Engine, renderer: Renderer, model_name: str, *, keep_alive_s: float = KEEP_ALIVE_S
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._model_name = model_name
        self._keep_alive_s = keep_alive_s
        self._sessions: dict[bytes, Session] = {}
        self._runner: web.AppRunner | None = None
        self._url: str | None = None

    @property
    def url(self) -> str:
        """What an agent is given as its base URL."""
        assert self._url is not None, "start() comes first"
        return self._url

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; port 0 takes a free one."""
        app = web.Application(client_max_size=BODY_LIMIT, middlewares=[_plain_errors])
        app.router.add_post("/v1/chat/completions", self._route(Chat(self._model_name, self._renderer.token_text)))
        app.router.add_get("/v1/models", self._models, allow_head=False)
        # Without handler_cancellation a call would go on sampling for an agent that has hung up.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=5)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self._url = f"http://{host}:{self._runner.addresses[0][1]}/v1"

    def open_session(
        self, label: str, *, seed: int, temperature: float, max_new_tokens: int, max_calls: int | None = None
    ) -> Session:
        """A new key for one rollout. `label` is for logs."""
        sampling = Sampling(seed=seed, temperature=temperature, max_new_tokens=max_new_tokens, max_calls=max_calls)
        session = Session(label, sampling, self._engine, self._renderer)
        self._sessions[_digest(session.key)] = session
        return session

    def close_session(self, session: Session) -> Recording:
        """Revoke the key, drop calls under way, and hand out the record."""
        self._sessions.pop(_digest(session.key), None)  # not there if the gateway was closed first
        return session.close()

    async def close(self) -> None:
        """End every session and stop listening."""
        for session in list(self._sessions.values()):
            self.close_session(session)
        if self._runner:
            await self._runner.cleanup()

    def _route(self, dialect: Dialect) -> Answer:
        async def serve(request: web.Request) -> web.StreamResponse:
            try:
                session = self._session(request)
                call = dialect.parse(await _read(request))
                send = self._stream if call.stream else self._answer
                return await send(request, session, call)
            except RefusedError as refused:
                return web.json_response(dialect.error(refused), status=refused.status)

        return serve

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session(request)
        except RefusedError as refused:
            return web.json_response(error_body(refused), status=refused.status)
        model = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "dockyard"}
        return web.json_response({"object": "list", "data": [model | {"max_model_len": self._engine.context_length}]})

    def _session(self, request: web.Request) -> Session:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        session = self._sessions.get(_digest(key.strip()))  # by digest: a lookup's time tells nothing about a key
        if session is None:
            raise unknown_key()
        return session

    async def _answer(self, request: web.Request, session: Session, call: Call) -> web.StreamResponse:
        task = session.submit(call.messages, call.max_tokens)
        with _delivering(task, session):
            await asyncio.wait({task})
            response = web.json_response(call.body(_outcome(task)))
            await response.prepare(request)
            await response.write_eof()
        return response

    async def _stream(self, request: web.Request, session: Session, call: Call) -> web.StreamResponse:
        """Nothing is sent until there is something to say, so that most errors can still be HTTP errors."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        task = session.submit(call.messages, call.max_tokens)
        with _delivering(task, session):
            while not (await asyncio.wait({task}, timeout=self._keep_alive_s))[0]:
                await response.prepare(request)
                await response.write(call.keep_alive())
            try:
                events = call.events(_outcome(task))
            except RefusedError as refused:
                if not response.prepared:
                    raise
                events = call.error_event(refused)
            await response.prepare(request)
            await response.write(events)
        return response


@contextmanager
def _delivering(task: asyncio.Task[Reply], session: Session) -> Generator[None, None, None]:
    """If the agent hangs up meanwhile, drop its call, or note that what was sampled did not arrive."""
    try:
        yield
    except (asyncio.CancelledError, ConnectionError):
        still_sampling = task.cancel()
        if not still_sampling and not task.cancelled() and task.exception() is None:
            session.mark_undelivered(task.result())
        raise


def _outcome(task: asyncio.Task[Reply]) -> Reply:
    if task.cancelled():  # the session was closed under it
        raise unknown_key()
    return task.result()


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogateescape")).digest()


async def _read(request: web.Request) -> object:
    if (request.content_length or 0) > BODY_LIMIT:
        raise _too_large()
    try:
        return _load_json((await request.read()).decode(errors="replace"))
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large() from error
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "invalid_request", f"the body is not JSON: {error}") from error


def _load_json(text: str) -> object:
    """Half a surrogate pair, as agents send for bytes that are no text, becomes a question mark."""
    value = json.loads(text)
    if re.search(r"\\u[dD][89a-fA-F]", text):
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def _too_large() -> RefusedError:
    return RefusedError(413, "body_too_large", f"the body is larger than {BODY_LIMIT} bytes")


@web.middleware
async def _plain_errors(request: web.Request, handler: Answer) -> web.StreamResponse:
    """Whatever is not a model route does not exist, with any method."""
    try:
        return await handler(request)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
        return web.json_response(error_body(RefusedError(404, "not_found", "no such route")), status=404)
