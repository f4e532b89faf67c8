"""A whole run on a machine that may be preempted: `dockyard train` in a persistent folder, resumed if it exists.

A TCP proxy forwards the public port of a Modal tunnel to a loopback port.
"""

import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from dockyard.errors import DockyardError
from dockyard.rollout.agents.wiring import runs_inside
from dockyard.rollout.environments import LOCAL
from dockyard.run_dir.run import ResumedRun, RunPaths, read_purpose
from dockyard.settings.load import load_run_config

DOCKYARD = (sys.executable, "-m", "dockyard")
_CHUNK_BYTES = 2**16


@contextmanager
def tcp_proxy(target: int) -> Generator[int]:
    """Open a public port that is forwarded to the loopback port `target`; yield the public port."""

    class Forwarder(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", target)) as inside:
                back = threading.Thread(target=_copy, args=(inside, self.request), daemon=True)
                back.start()
                _copy(self.request, inside)
                back.join()

    with _Server(("0.0.0.0", 0), Forwarder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


class Tunnel(Protocol):
    """A port of this machine with a public URL."""

    @property
    def url(self) -> str: ...


type Forward = Callable[[int], AbstractContextManager[Tunnel]]


def train_in(folder: Path, words: Sequence[str], forward: Forward, *, resume: bool) -> int:
    """Train in this folder and return the exit code. Raise if the process was killed, so that Modal retries."""
    if RunPaths(folder).config.is_file() and not resume:
        words, resume = (), True  # an earlier attempt has started the run
    was = read_purpose(folder)
    where = f"--resume={folder}" if resume else f"--run_dir={folder}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with gateway_settings(_has_remote_agents(folder, words, resume), forward) as settings:
        command = [*DOCKYARD, was.verb if was else "train", *words, where, *settings]
        code = subprocess.run(command, check=False).returncode
    if code < 0:
        raise RuntimeError(f"training was ended by signal {-code}")
    return code


def _has_remote_agents(folder: Path, words: Sequence[str], resume: bool) -> bool:
    """Whether agents call the gateway from remote environments."""
    settings = [word for word in words if "=" in word]
    try:
        config = ResumedRun.read(folder, settings).config if resume else load_run_config(None, settings)
    except DockyardError:  # the command will report it
        return False
    return config.environment.type not in LOCAL and runs_inside(config.agent)


@contextmanager
def gateway_settings(needed: bool, forward: Forward) -> Generator[list[str]]:
    """Yield the settings with which remote agents reach the gateway."""
    if not needed:
        yield []
        return
    port = free_port()
    with tcp_proxy(port) as public_port, forward(public_port) as tunnel:
        yield [f"--gateway.port={port}", f"--gateway.public_url={tunnel.url}"]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
