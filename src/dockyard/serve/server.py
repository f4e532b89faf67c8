"""The stand-alone server: an engine and a gateway with one session that all clients share, until Ctrl-C."""

import asyncio
import errno
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from yarl import URL

from dockyard import process
from dockyard.collect.model_files import ModelFiles, find_files
from dockyard.engine.custom import check_engine
from dockyard.engine.open import EngineSpec, open_engine
from dockyard.engine.openai import TextEndpoint
from dockyard.engine.protocol import Engine
from dockyard.errors import DockyardError
from dockyard.gateway.accounting import SessionLimits
from dockyard.gateway.admin import Admin
from dockyard.gateway.protocol import ClientSamplingReader
from dockyard.gateway.server import Gateway
from dockyard.gateway.sessions import Sampling, Session
from dockyard.gateway.shared_session import SharedSession
from dockyard.gateway.text_session import session_factory
from dockyard.serve.options import AdminOptions, ServeOptions

logger = logging.getLogger(__name__)

_UNLIMITED = SessionLimits(max_concurrency=1024, max_waiting=8192)
"""Engines queue by themselves."""
_DEFAULT_RANK = 16
_EVERYWHERE = ("0.0.0.0", "::", "")


def serve(options: ServeOptions, announce: Callable[[str], None]) -> None:
    """Serve until a signal arrives. Check what can be checked before loading weights."""
    check_engine(options.engine)
    _check_address(options.host, options.port)
    if options.admin and options.admin.port:
        _check_address("127.0.0.1", options.admin.port)
    if options.key is None and options.host not in ("127.0.0.1", "localhost", "::1"):
        logger.warning("whoever reaches %s may use the model: `--no-auth` is on", options.host)
    process.run(keep_serving(options, find_files(options.model, options.engine), announce))


async def keep_serving(options: ServeOptions, files: ModelFiles | None, announce: Callable[[str], None]) -> None:
    """Serve until cancelled."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(_open_engine(options, files))
        renderer = files.renderer if files and not isinstance(engine, TextEndpoint) else None
        gateway = Gateway(session_factory(engine, renderer), options.served_name)
        stack.push_async_callback(gateway.close)
        shared = open_shared_session(options, gateway)
        with _listening(f"{options.host}:{options.port}", "--port 0"):
            await gateway.start(options.host, options.port)
        told = await stack.enter_async_context(_opened_admin(options.admin, gateway, engine, shared))
        announce(_ready(options, gateway) + told)
        await asyncio.Event().wait()


def open_shared_session(options: ServeOptions, gateway: Gateway) -> SharedSession:
    """The session that all clients share."""

    def open_session() -> Session:
        seed = secrets.randbits(63)
        sampling = Sampling(seed=seed, temperature=options.temperature, max_new_tokens=options.max_new_tokens)
        return gateway.new_session("serve", sampling, _UNLIMITED)

    shared = SharedSession(open_session, options.key.value if options.key else secrets.token_urlsafe(16))
    gateway.host(shared, ClientSamplingReader().read, for_any_key=options.key is None)
    return shared


@asynccontextmanager
async def _open_engine(options: ServeOptions, files: ModelFiles | None) -> AsyncGenerator[Engine | TextEndpoint]:
    spec = EngineSpec(
        engine=options.engine,
        model=options.model,
        model_dir=files.folder if files else None,
        lora_rank=_DEFAULT_RANK,
        adapter=options.adapter,
        adapter_version=0,
    )
    async with open_engine(spec) as engine:
        if options.engine.type == "transformers" and not isinstance(engine, TextEndpoint):
            _check_context(options, engine.context_length)
        yield engine


def _check_context(options: ServeOptions, available: int) -> None:
    """Refuse a context that is longer than the embedded engine can provide."""
    wanted = options.engine.context_length
    if wanted and available < wanted:
        raise DockyardError(
            f"`--context-length` is {wanted}, and `{options.model.name}` has {available}",
            hint="leave it out to take what the model has",
        )


@asynccontextmanager
async def _opened_admin(
    options: AdminOptions | None, gateway: Gateway, engine: Engine | TextEndpoint, shared: SharedSession
) -> AsyncGenerator[str]:
    """Words for the line that says what is served."""
    if options is None:
        yield ""
        return
    publish = None if isinstance(engine, TextEndpoint) else engine.publish
    admin = Admin(gateway, options.token.value, publish=publish, describe=lambda: {"serve": shared.stats})
    try:
        if options.socket:
            with _listening(str(options.socket), "--admin-port 0"):
                url = await admin.start_socket(options.socket)
        else:
            with _listening(f"127.0.0.1:{options.port}", "--admin-port 0"):
                url = await admin.start_port(options.port or 0)
        yield f"; admin at {url} with the token {options.token.shown}"
    finally:
        await admin.close()


def _check_address(host: str, port: int) -> None:
    """Minutes before the model is loaded."""
    with _listening(f"{host}:{port}", "--port 0"):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()


@contextmanager
def _listening(where: str, way_out: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        hint = (
            f"another server has it; `{way_out}` takes a free one" if taken else "check the address, and who may use it"
        )
        raise DockyardError(f"cannot listen on `{where}`: {error.strerror or error}", hint=hint) from error


def _ready(options: ServeOptions, gateway: Gateway) -> str:
    """One line: what is where, and what to tell a client."""
    root = URL(gateway.root_url)
    root = root.with_host("127.0.0.1") if options.host in _EVERYWHERE else root
    key = options.key.shown if options.key else "any"
    base = str(root).rstrip("/")
    return (
        f"serving {options.served_name} at {base}/v1 (OpenAI) and {base} (Anthropic): "
        f"OPENAI_BASE_URL={base}/v1 OPENAI_API_KEY={key}"
    )
