"""From a port that is open to everybody, which is what a tunnel of Modal's leads to, to one of loopback."""

import socket
import socketserver
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

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
