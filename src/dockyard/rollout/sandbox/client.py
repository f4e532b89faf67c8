"""The driver's side of a running sandbox: start it, run commands in it, stop it. Never blocks the event loop."""

import asyncio
import marshal
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from dockyard.process import Sink
from dockyard.rollout.blame import SandboxDiedError, SealError
from dockyard.rollout.sandbox.file_ops import ErrandError
from dockyard.rollout.sandbox.launch import SandboxLimits, launch_with_landlock, launch_with_namespaces

NAMESPACES, LANDLOCK = "namespaces", "landlock"
KILLED = 137
DONE = b"done"
MAX_ANSWER_BYTES = 1 << 16
PIPE_CAPACITY = 1 << 20
"""The largest amount of data that a process can leave in a pipe."""
KILL_PATIENCE_S = 5.0
SEAL_PATIENCE_S = 120.0
CLEAN_UP_PATIENCE_S = 60.0
"""Includes the removal of the files that a task left on the disk."""


class SandboxStartError(Exception):
    """bubblewrap or the server inside did not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to run inside. 0 means no limit."""

    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    max_processes: int = 0
    """Of the whole sandbox."""
    max_memory_bytes: int = 0
    """Private memory of each process."""

    def encode(self) -> bytes:
        return _encode((list(self.argv), self.cwd, self.env, self.max_processes, self.max_memory_bytes))


class Sandbox:
    """Processes that see only each other, including our server. They end with this object, or with the driver."""

    def __init__(
        self, process: asyncio.subprocess.Process, requests: socket.socket, errors: int, alive: int, mechanism: str
    ) -> None:
        self._process = process
        self._requests = requests
        self._errors = errors
        self._alive = alive
        self._mechanism = mechanism

    @classmethod
    async def start(cls, mechanism: str, limits: SandboxLimits, *, network: bool) -> "Sandbox":
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        requests.setblocking(False)
        with ExitStack() as on_error:
            on_error.callback(requests.close)
            errors = _closing(on_error, os.memfd_create("errors"))
            watched, alive = os.pipe()
            _closing(on_error, alive)
            with theirs, ExitStack() as sent:
                stdin = _closing(sent, watched)
                process = await _spawn(theirs.fileno(), stdin, errors, mechanism, limits, network=network)
            if not await asyncio.get_running_loop().sock_recv(requests, 16):
                await process.wait()
                raise SandboxStartError(_last_words(errors) or f"it ended with {process.returncode}")
            on_error.pop_all()
        return cls(process, requests, errors, alive, mechanism)

    async def run(
        self, command: Command, *, stdout: Sink, stderr: Sink, stdin: int | None = None, timeout_s: float | None = None
    ) -> int:
        """Run a command and return its return code. Raise TimeoutError if it took too long.

        Then, and when the caller is cancelled, the command is killed with everything it started.
        """
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            control, theirs = socket.socketpair()
            stack.enter_context(control).setblocking(False)
            with ExitStack() as sent:
                sent.enter_context(theirs)
                source = _closing(sent, os.open(os.devnull, os.O_RDONLY)) if stdin is None else stdin
                out, out_end = _pipe(stack, sent)
                err, err_end = _pipe(stack, sent)
                await self._send(b"run", [theirs.fileno(), source, out_end, err_end, out, err])
            flush_out = _pump(stack, out, stdout)
            flush_err = _pump(stack, err, stderr)
            try:
                async with asyncio.timeout(timeout_s):
                    with suppress(BrokenPipeError, ConnectionResetError):
                        await loop.sock_sendall(control, self._limited(command).encode())
                    reply = await _receive(control)
            except TimeoutError:
                await _hang_up(control)
                raise
            flush_out()
            flush_err()
            return int.from_bytes(reply, "big") if reply else await self._code_without_reply()

    def _limited(self, command: Command) -> Command:
        """Without namespaces the tracer counts the processes: the kernel would count all processes of the user."""
        return command if self._mechanism == NAMESPACES else replace(command, max_processes=0)

    async def errand(self, name: str, *args: object, stream: int | None = None, timeout_s: float | None = None) -> None:
        """Make the server itself run one of `ERRANDS`. Raise ErrandError with the reason if that fails."""
        with ExitStack() as stack:
            control = await self._open(stack, b"errand", *(() if stream is None else (stream,)))
            async with asyncio.timeout(timeout_s):
                with suppress(BrokenPipeError, ConnectionResetError):
                    await asyncio.get_running_loop().sock_sendall(control, _encode((name, list(args))))
                answer = await _receive(control, MAX_ANSWER_BYTES)
        if not answer:
            raise ErrandError(f"return code {await self._code_without_reply()}")
        if answer != DONE:
            raise ErrandError(answer.decode(errors="replace"))

    async def kill_all(self) -> None:
        """Kill every process inside except the server. Raise SealError if one has changed how the server runs."""
        with ExitStack() as stack:
            control = await self._open(stack, b"kill")
            try:
                async with asyncio.timeout(SEAL_PATIENCE_S):
                    done = await _receive(control)
            except TimeoutError:  # a command stopped the server, which an older Landlock does not prevent
                raise SandboxDiedError(f"the sandbox did not answer within {SEAL_PATIENCE_S:g} s") from None
            if not done:
                raise self._died("the sandbox ended")
            if done != DONE:
                raise SealError("a command changed the limits or the scheduling of the sandbox's server")

    async def stop(self) -> None:
        """Return when none of its processes is left: PID 1 ends after all others, and bwrap after PID 1."""
        if self._requests.fileno() < 0:
            return
        self._requests.close()
        os.close(self._errors)
        os.close(self._alive)
        try:
            async with asyncio.timeout(KILL_PATIENCE_S if self._mechanism == NAMESPACES else CLEAN_UP_PATIENCE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _open(self, stack: ExitStack, message: bytes, *fds: int) -> socket.socket:
        """Send a request and return the socket that its answer comes over."""
        control, theirs = socket.socketpair()
        stack.enter_context(control).setblocking(False)
        with theirs:
            await self._send(message, [theirs.fileno(), *fds])
        return control

    async def _send(self, message: bytes, fds: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self._requests, [message], fds)
                return
            except BlockingIOError:  # the server has not read the requests before
                await asyncio.sleep(0.01)
            except OSError as error:
                raise self._died("the sandbox ended") from error

    async def _code_without_reply(self) -> int:
        """Return the code of a command whose supervisor was killed, or raise if the whole sandbox ended."""
        with ExitStack() as stack:
            control = await self._open(stack, b"ping")
            if await _receive(control):
                return KILLED
        raise self._died("the sandbox ended while a command ran")

    def _died(self, message: str) -> SandboxDiedError:
        """Return the error, with the limit that the sandbox exceeded if that is the reason."""
        reason = _last_words(self._errors) if self._requests.fileno() >= 0 else ""
        return SandboxDiedError(f"{message}: {reason}" if reason else message)


async def _spawn(
    server_socket: int, stdin: int, errors: int, mechanism: str, limits: SandboxLimits, *, network: bool
) -> asyncio.subprocess.Process:
    """Start the sandbox's first process. Its stdin is closed when the driver ends."""
    prepare = launch_with_namespaces if mechanism == NAMESPACES else launch_with_landlock
    with prepare(server_socket=server_socket, limits=limits, network=network) as launch:
        return await asyncio.create_subprocess_exec(
            *launch.args,
            executable=launch.executable,
            env=launch.env,
            pass_fds=launch.pass_fds,
            user=launch.user,
            group=launch.user,
            extra_groups=None if launch.user is None else [],
            cwd="/",
            stdin=stdin,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=errors,
        )


def _last_words(errors: int) -> str:
    return os.pread(errors, 4096, 0).decode(errors="replace").strip()


def _encode(request: tuple[Any, ...]) -> bytes:
    body = marshal.dumps(request)
    return len(body).to_bytes(4, "big") + body


async def _receive(control: socket.socket, at_most: int = 4) -> bytes:
    with suppress(ConnectionResetError):
        return await asyncio.get_running_loop().sock_recv(control, at_most)
    return b""


async def _hang_up(control: socket.socket) -> None:
    """Make the server kill the command's processes, and wait for that."""
    with suppress(OSError):
        control.shutdown(socket.SHUT_WR)
    with suppress(TimeoutError):
        async with asyncio.timeout(KILL_PATIENCE_S):
            await _receive(control)


def _closing(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _pipe(ours: ExitStack, theirs: ExitStack) -> tuple[int, int]:
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(write, True)
    os.fchmod(write, 0o666)  # so that a sandbox's own user can open it as /dev/stdout
    return _closing(ours, read), _closing(theirs, write)


def _pump(stack: ExitStack, fd: int, sink: Sink) -> Callable[[], None]:
    """Copy data from `fd` to `sink` as it arrives. The returned function copies the rest at the end."""
    loop = asyncio.get_running_loop()

    def move(at_most: int = 1 << 16) -> int:
        try:
            data = os.read(fd, at_most)
        except BlockingIOError:
            return 0
        if not data:
            loop.remove_reader(fd)
        sink.write(data)
        return len(data)

    def flush() -> None:
        left = PIPE_CAPACITY  # not until the end: a background process may continue to write
        while left > 0 and (moved := move(left)):
            left -= moved

    loop.add_reader(fd, move)
    stack.callback(loop.remove_reader, fd)
    return flush
