"""Stop signals, and the output of child processes.

The first Ctrl-C or SIGTERM stops the work cleanly, the second ends the process at once. The second signal is left to
the kernel, because a process that is busy in native code never runs a Python handler.
"""

import asyncio
import signal
import threading
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from dockyard.errors import DockyardError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.2


@contextmanager
def stopped_by_signals() -> Generator[None]:
    """Make the first signal raise KeyboardInterrupt in the main thread."""
    before = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def signal_handlers_restored() -> Generator[None]:
    """Restore the signal handlers when the block ends, also after a signal. For callers that outlive the work."""
    if not _is_main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: installed by C code, which Python cannot restore
                signal.signal(number, handler)


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, but a signal cancels `main`, waits for its end, and raises KeyboardInterrupt.

    Outside the main thread signals are not handled; there a `blocking` call that is interrupted cancels `main`.
    """
    if not _is_main_thread():
        return _run_in_thread(main)
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


class _StopRequest:
    """Cancels the coroutine that another thread runs, at once or when it starts."""

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._cancel: Callable[[], object] = lambda: None

    def set(self) -> None:
        with self._lock:
            self.is_set = True
            self._cancel()

    async def cancels[T](self, main: Coroutine[Any, Any, T]) -> T:
        """Await `main`, and cancel it when the request is set."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(main)
        with self._lock:
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            if self.is_set:
                task.cancel()
        try:
            return await task
        finally:
            with self._lock:
                self._cancel = lambda: None


_STOP_REQUEST: ContextVar[_StopRequest | None] = ContextVar("_STOP_REQUEST", default=None)


def blocking[T](call: Callable[[], T]) -> T:
    """Call a function that uses `run`, from any thread.

    If an event loop is running in this thread, as in a notebook, the function runs in a thread of its own, and a
    KeyboardInterrupt here cancels the coroutine there and waits for it to clean up.
    """
    with signal_handlers_restored():
        if not _is_loop_running():
            return call()
        if _is_main_thread():  # `asyncio.run` would cancel the task that is blocked here
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return _call_in_thread(call)


def _call_in_thread[T](call: Callable[[], T]) -> T:
    """Call the function in a new thread. An executor could lose its thread to a KeyboardInterrupt during `submit`."""
    request, context, done, ready = _StopRequest(), copy_context(), Future[T](), threading.Event()
    context.run(_STOP_REQUEST.set, request)

    def work() -> None:
        ready.wait()
        try:
            if request.is_set:
                raise KeyboardInterrupt
            done.set_result(context.run(call))
        except BaseException as error:  # raised in the calling thread
            done.set_exception(error)

    try:
        threading.Thread(target=work, name="dockyard").start()
        ready.set()
        while not wait([done], _POLL_S).done:
            pass  # a signal that another thread received is noticed only between two waits
        return done.result()
    except KeyboardInterrupt:
        request.set()
        if ready.is_set():
            wait([done])
        ready.set()
        raise


def _run_in_thread[T](main: Coroutine[Any, Any, T]) -> T:
    request = _STOP_REQUEST.get() or _StopRequest()
    try:
        return asyncio.run(request.cancels(main))
    except asyncio.CancelledError:
        if not request.is_set:
            raise
        raise KeyboardInterrupt from None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


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
    """Cancel the block and raise this error when the process ends, because nothing would start it again."""
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
        if not watching.done() or block.cancelling() > cancels + 1:  # cancelled by something else
            raise
        raise reason() from None
    finally:
        if not watching.cancel():
            block.uncancel()


class Sink(Protocol):
    """Receives a command's output as it arrives. `write` returns True if it needs no more, so the command may end."""

    def write(self, data: bytes, /) -> bool | None: ...


@dataclass(slots=True)
class Output:
    """A command's output as text. It keeps the first and the last megabyte."""

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
