"""Runs a coroutine to its end for callers that are not asynchronous, inside a notebook's running loop too."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dockyard import interrupt


def run_to_end[T](main: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns. Ctrl-C cancels it and waits for it to clean up."""
    if threading.current_thread() is threading.main_thread() and not _is_loop_running():
        return interrupt.run(main)
    loop = asyncio.new_event_loop()
    task = loop.create_task(main)
    with ThreadPoolExecutor(1, "dockyard-rollouts") as thread:
        running = thread.submit(_run, loop, task)
        try:
            return running.result()
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(task.cancel)
            raise


def _run[T](loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(_result(task))


async def _result[T](task: asyncio.Task[T]) -> T:
    return await task


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
