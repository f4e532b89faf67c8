"""A whole run on a machine that may be preempted: `dockyard train` in a persistent folder, resumed if it exists.

A TCP proxy leads from the public port of a Modal tunnel to a loopback port.
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

_AT_ONCE = 2**16


@contextmanager
def passage(target: int) -> Generator[int]:
    """The open port; what comes there goes to `target`."""

    class Carry(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", target)) as inside:
                back = threading.Thread(target=_copy, args=(inside, self.request), daemon=True)
                back.start()
                _copy(self.request, inside)
                back.join()

    with _Server(("0.0.0.0", 0), Carry) as server:
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
        while data := source.recv(_AT_ONCE):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


_DOCKYARD = (sys.executable, "-c", "import sys; from dockyard.cli import main; sys.exit(main())")


class Tunnel(Protocol):
    """A port of this machine as the world sees it."""

    @property
    def url(self) -> str: ...


type Forward = Callable[[int], AbstractContextManager[Tunnel]]


def train_in(folder: Path, words: Sequence[str], forward: Forward, *, resume: bool) -> int:
    """Train with these arguments in this folder; the exit code. A process that was killed raises: Modal tries again."""
    if RunPaths(folder).config.is_file() and not resume:
        words, resume = (), True  # an earlier try has begun the run
    was = read_purpose(folder)
    where = f"--resume={folder}" if resume else f"--run_dir={folder}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with way_back(_calls_from_afar(folder, words, resume), forward) as way:
        command = [*_DOCKYARD, was.verb if was else "train", *words, where, *way]
        code = subprocess.run(command, check=False).returncode
    if code < 0:
        raise RuntimeError(f"training was ended by signal {-code}")
    return code


def _calls_from_afar(folder: Path, words: Sequence[str], resume: bool) -> bool:
    """Whether agents will call the gateway from other sandboxes."""
    settings = [word for word in words if "=" in word]
    try:
        config = ResumedRun.read(folder, settings).config if resume else load_run_config(None, settings)
    except DockyardError:  # which the command is about to say itself
        return False
    return config.environment.type not in LOCAL and runs_inside(config.agent)


@contextmanager
def way_back(needed: bool, forward: Forward) -> Generator[list[str]]:
    """Settings by which agents reach the gateway from there."""
    if not needed:
        yield []
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with passage(port) as door, forward(door) as tunnel:
        yield [f"--gateway.port={port}", f"--gateway.public_url={tunnel.url}"]
