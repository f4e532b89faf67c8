"""Stop signals, and the output of child processes.

The first Ctrl-C or SIGTERM stops the work cleanly, the second ends the process at once. The second signal is left to
the kernel, because a process that is busy in native code never runs a Python handler.
"""

import asyncio
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from dockyard.errors import DockyardError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopped_by_signals() -> Generator[None]:
    """Inside, the first signal raises KeyboardInterrupt in the main thread."""
    before = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:
            for number, handler in before.items():
                signal.signal(number, handler)


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, where the first signal cancels `main` and its end then raises KeyboardInterrupt."""
    stop = asyncio.Event()
    try:
        result = asyncio.run(_cancel_on_signal(main, stop))
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        raise KeyboardInterrupt from None
    if stop.is_set():
        raise KeyboardInterrupt
    return result


async def _cancel_on_signal[T](main: Coroutine[Any, Any, T], stop: asyncio.Event) -> T:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main)
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def on_signal() -> None:
        stop.set()
        task.cancel()
        _leave_to_kernel(loop)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        return await task
    finally:
        if not stop.is_set():
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)


def _leave_to_kernel(loop: asyncio.AbstractEventLoop | None = None) -> None:
    for number in _SIGNALS:
        if loop:
            loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    _leave_to_kernel()
    raise KeyboardInterrupt


@asynccontextmanager
async def ends_with(process: Process, reason: Callable[[], DockyardError]) -> AsyncGenerator[None]:
    """The block is given up when the process ends, with this reason: nobody would start it again."""
    block = asyncio.current_task()
    assert block is not None
    cancels = block.cancelling()

    async def watch() -> None:
        await process.wait()
        block.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not watching.done() or block.cancelling() > cancels + 1:  # somebody else wants it to end
            raise
        raise reason() from None
    finally:
        if not watching.cancel():
            block.uncancel()


class Sink(Protocol):
    """Takes a command's output as it comes. True: it has enough, and the command may as well end."""

    def write(self, data: bytes, /) -> bool | None: ...


@dataclass(slots=True)
class Output:
    """A command's output as text: the first and the last megabyte of it."""

    keep_bytes: int = 1 << 20
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    num_dropped: int = 0

    def write(self, data: bytes, /) -> None:
        room = max(0, self.keep_bytes - len(self.head))
        self.head += data[:room]
        self.tail += data[room:]
        excess = len(self.tail) - self.keep_bytes
        if excess > 0:
            del self.tail[:excess]
            self.num_dropped += excess

    def text(self) -> str:
        note = f"\n[{self.num_dropped} bytes left out]\n".encode() if self.num_dropped else b""
        return (bytes(self.head) + note + bytes(self.tail)).decode(errors="replace")
