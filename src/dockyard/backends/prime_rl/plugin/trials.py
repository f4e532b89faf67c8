"""Harbor trials inside another program: shared resources are open while at least one trial is running."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from dockyard.rollout.plan import Attempt
from dockyard.rollout.trial import TrialRunner
from dockyard.types import Task


class Trials:
    """The concurrent trials of one process."""

    def __init__(self, open_runner: Callable[[], AbstractAsyncContextManager[TrialRunner]]) -> None:
        self._open_runner = open_runner
        self._changing = asyncio.Lock()
        self._num_running = 0
        self._open = AsyncExitStack()
        self._runner: TrialRunner | None = None

    @asynccontextmanager
    async def runner(self) -> AsyncGenerator[TrialRunner]:
        """Provide the shared environments and gateway. The first trial opens them, the last one closes them."""
        async with self._changing:
            if self._runner is None:
                self._runner = await self._open.enter_async_context(self._open_runner())
            self._num_running += 1
        try:
            yield self._runner
        finally:
            async with self._changing:
                self._num_running -= 1
                if not self._num_running:
                    self._runner = None
                    await self._open.aclose()


def attempt_of(task: Task, trial_id: str, *, seed: int, temperature: float) -> Attempt:
    """Return the attempt with this id. The caller groups its rollouts itself."""
    name = f"{task.path.name[:64]}-{trial_id[:16]}"
    return Attempt(name=name, task=task, group=0, index=0, seed=seed, temperature=temperature)


async def run_to_the_end[T](work: Coroutine[Any, Any, T]) -> T:
    """Await the work. On cancellation cancel it once, and wait for its cleanup even if cancelled again."""
    task = asyncio.create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
            if not task.cancelling():  # a closing event loop has cancelled it already
                task.cancel()
    if cancelled:
        raise asyncio.CancelledError
    return task.result()
