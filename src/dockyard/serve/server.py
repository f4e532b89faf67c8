"""The stand-alone server: an engine and a gateway with one session that all clients share, until Ctrl-C."""

import asyncio
import errno
import logging
import secrets
import socket
from collections.abc import Callable, Generator
from contextlib import AsyncExitStack, contextmanager

from yarl import URL

from dockyard import process
from dockyard.collect.open import ModelFiles, find_files
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
from dockyard.serve.options import ServeConfig, ServeOptions

logger = logging.getLogger(__name__)

_UNLIMITED = SessionLimits(max_concurrency=1024, max_waiting=8192)
"""Engines have their own queues."""
_DEFAULT_RANK = 16
_ALL_ADDRESSES = ("0.0.0.0", "::", "")


def serve(options: ServeOptions, announce: Callable[[str], None]) -> None:
    """Serve until a signal arrives. Check what can be checked before loading weights."""
    config = options.config
    _check_address(config.host, config.port)
    if config.admin_port:
        _check_address("127.0.0.1", config.admin_port)
    if options.key is None and config.host not in ("127.0.0.1", "localhost", "::1"):
        logger.warning("anybody who can reach %s can use the model: `--no-auth` is set", config.host)
    process.run(keep_serving(options, find_files(config.model, config.engine), announce))


async def keep_serving(options: ServeOptions, files: ModelFiles | None, announce: Callable[[str], None]) -> None:
    """Serve until cancelled."""
    config = options.config
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(open_engine(_engine_spec(config, files)))
        _check_context(config, engine)
        renderer = files.renderer if files and not isinstance(engine, TextEndpoint) else None
        gateway = Gateway(session_factory(engine, renderer), options.served_name)
        stack.push_async_callback(gateway.close)
        shared = open_shared_session(options, gateway)
        with _listening(f"{config.host}:{config.port}", "--port 0"):
            await gateway.start(config.host, config.port)
        lines = [_description(options, gateway)]
        if token := options.admin_token:
            publish = None if isinstance(engine, TextEndpoint) else engine.publish
            admin = Admin(gateway, token.value, publish=publish, describe=lambda: {"serve": shared.stats})
            stack.push_async_callback(admin.close)
            lines.append(f"admin at {await _start(admin, config)} with the token {token.shown}")
        announce("; ".join(lines))
        await asyncio.Event().wait()


def open_shared_session(options: ServeOptions, gateway: Gateway) -> SharedSession:
    """Open the session that all clients share."""
    config = options.config

    def open_session() -> Session:
        seed = secrets.randbits(63)
        sampling = Sampling(seed=seed, temperature=config.temperature, max_new_tokens=config.max_new_tokens)
        return gateway.new_session("serve", sampling, _UNLIMITED)

    shared = SharedSession(open_session, options.key.value if options.key else secrets.token_urlsafe(16))
    gateway.host(shared, ClientSamplingReader().read, for_any_key=options.key is None)
    return shared


def _engine_spec(config: ServeConfig, files: ModelFiles | None) -> EngineSpec:
    return EngineSpec(
        engine=config.engine,
        model=config.model,
        model_dir=files.folder if files else None,
        lora_rank=_DEFAULT_RANK,
        adapter=config.adapter,
        adapter_version=0,
    )


def _check_context(config: ServeConfig, engine: Engine | TextEndpoint) -> None:
    """Refuse a context that is longer than the embedded engine can provide."""
    if config.engine.type != "transformers" or isinstance(engine, TextEndpoint):
        return
    wanted, available = config.engine.context_length, engine.context_length
    if wanted and available < wanted:
        raise DockyardError(
            f"`--context-length` is {wanted}, and `{config.model.name}` has {available}",
            hint="leave it out to use the model's context length",
        )


async def _start(admin: Admin, config: ServeConfig) -> str:
    """Start the admin listener and return its address."""
    if config.admin_socket:
        with _listening(str(config.admin_socket), "--admin-port 0"):
            return await admin.start_socket(config.admin_socket)
    with _listening(f"127.0.0.1:{config.admin_port}", "--admin-port 0"):
        return await admin.start_port(config.admin_port or 0)


def _check_address(host: str, port: int) -> None:
    """Raise an error if the address is in use, before the model is loaded, which can take minutes."""
    with _listening(f"{host}:{port}", "--port 0"):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()


@contextmanager
def _listening(where: str, flag: str) -> Generator[None]:
    """Turn an error of listening on this address into one with a hint. `flag` selects a free port instead."""
    try:
        yield
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        hint = (
            f"another server uses it; `{flag}` uses a free port" if taken else "check the address and its permissions"
        )
        raise DockyardError(f"cannot listen on `{where}`: {error.strerror or error}", hint=hint) from error


def _description(options: ServeOptions, gateway: Gateway) -> str:
    """Describe in one line what is served where, with the settings of a client."""
    root = URL(gateway.root_url)
    root = root.with_host("127.0.0.1") if options.config.host in _ALL_ADDRESSES else root
    key = options.key.shown if options.key else "any"
    base = str(root).rstrip("/")
    return (
        f"serving {options.served_name} at {base}/v1 (OpenAI) and {base} (Anthropic): "
        f"OPENAI_BASE_URL={base}/v1 OPENAI_API_KEY={key}"
    )
