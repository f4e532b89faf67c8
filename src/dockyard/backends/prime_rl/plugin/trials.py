"""Harbor trials in a process that others own: what trials share is open as long as one of them is under way."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from dockyard.rollout.trial import TrialRunner


class Trials:
    """The trials of one process, of which many may run at once."""

    def __init__(self, open_runner: Callable[[], AbstractAsyncContextManager[TrialRunner]]) -> None:
        self._open_runner = open_runner
        self._changing = asyncio.Lock()
        self._num_under_way = 0
        self._open = AsyncExitStack()
        self._runner: TrialRunner | None = None

    @asynccontextmanager
    async def runner(self) -> AsyncGenerator[TrialRunner]:
        """What trials have in common: environments and a gateway. Opened by the first, closed by the last."""
        async with self._changing:
            if self._runner is None:
                self._runner = await self._open.enter_async_context(self._open_runner())
            self._num_under_way += 1
        try:
            yield self._runner
        finally:
            async with self._changing:
                self._num_under_way -= 1
                if not self._num_under_way:
                    self._runner = None
                    await self._open.aclose()


async def run_to_the_end[T](work: Coroutine[Any, Any, T]) -> T:
    """Await it. When we are cancelled, so is the work, once, and its cleaning up is waited for, however often."""
    task = asyncio.create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
            if not task.cancelling():  # a loop that ends has cancelled it already
                task.cancel()
    if cancelled:
        raise asyncio.CancelledError
    return task.result()
