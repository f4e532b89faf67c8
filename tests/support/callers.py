"""The places from which a blocking function may be called, and a check that the call leaves nothing behind."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

type Caller = Callable[[Callable[[], object]], object]


def directly(call: Callable[[], object]) -> object:
    return call()


def in_a_running_loop(call: Callable[[], object]) -> object:
    async def main() -> object:
        return call()

    return asyncio.run(main())


def in_a_thread(call: Callable[[], object]) -> object:
    results: list[object] = []

    def keep() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=keep)
    thread.start()
    thread.join()
    [result] = results
    if isinstance(result, BaseException):
        raise result
    return result


def in_a_running_loop_of_a_thread(call: Callable[[], object]) -> object:
    return in_a_thread(lambda: in_a_running_loop(call))


from_anywhere = pytest.mark.parametrize(
    "caller", [directly, in_a_running_loop, in_a_thread, in_a_running_loop_of_a_thread]
)


@contextmanager
def nothing_left_behind() -> Generator[None]:
    """Assert that the block changes no environment variable or signal handler, and leaves no event loop or thread."""
    variables, handlers, threads = dict(os.environ), _handlers(), threading.active_count()
    yield
    assert dict(os.environ) == variables
    assert _handlers() == handlers
    assert signal.set_wakeup_fd(-1) == -1
    deadline = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread lives a moment longer than its work
    assert threading.active_count() <= threads
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


def _handlers() -> dict[int, object]:
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
