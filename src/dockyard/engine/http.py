"""A model server over HTTP. Failures that pass, such as its restart, are waited out for a bounded time."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import aiohttp
from yarl import URL

from dockyard.errors import DockyardError, EngineError

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 120.0  # of every call but generation, which takes as long as it takes
_CONNECT_TIMEOUT_S = 10.0
_KEEP_ALIVE_S = 2.0  # uvicorn, under vLLM and SGLang, hangs up after 5 s, and a call sent at that moment is lost
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
_WATCH_S = 5.0
_PASSING = frozenset({429, 500, 502, 503, 504})
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class ServerResponse:
    """What a server said. `body` is its JSON, or its text where that is none."""

    status: int
    body: Any

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def reason(self) -> str:
        """What a refusal says, in one line. Servers put it in different places."""
        found: Any = self.body
        for key in ("error", "error_message", "message", "detail"):
            if isinstance(found, dict) and key in found:
                found = cast(Any, found[key])
        text = found if isinstance(found, str) else json.dumps(found)
        return f"HTTP {self.status}: {' '.join(text.split())[:300]}"


class ModelServer:
    """One server at one address. To be made inside an event loop."""

    def __init__(self, url: str, *, api_key: str | None = None, retry_s: float = 0, watch_s: float = _WATCH_S) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._retry_s = retry_s
        self._watch_s = watch_s
        self._failing_since: float | None = None
        self._down_s = 0.0
        self._under_way: set[asyncio.Task[ServerResponse]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            trust_env=URL(self.url).host not in _LOOPBACK,  # a proxy in the environment is for the world outside
        )

    @property
    def down_s(self) -> float:
        """For how many seconds in all it has not answered."""
        return self._down_s + (time.monotonic() - self._failing_since if self._failing_since is not None else 0.0)

    async def get(self, path: str, *, patient: bool = True) -> ServerResponse:
        """Ask; with `patient` false a server that does not answer is an error at once."""
        send = partial(self._send, "GET", path, None, CONTROL_TIMEOUT_S)
        return await self._patiently(path, send, self._retry_s if patient else 0)

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        final: frozenset[int] = frozenset(),
        timeout_s: float = CONTROL_TIMEOUT_S,
        patient: bool = True,
    ) -> ServerResponse:
        """Send JSON. `final` are statuses that are an answer here, and elsewhere a failure that passes."""
        send = partial(self._send, "POST", path, body, timeout_s)
        return await self._patiently(path, send, self._retry_s if patient else 0, _PASSING - final)

    async def generate(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> ServerResponse:
        """Send JSON whose answer may take any time, as long as the server is there."""
        return await self._patiently(path, partial(self._send_watched, path, body, headers), self._retry_s)

    async def close(self) -> None:
        if self._watcher:
            self._watcher.cancel()
        await self._session.close()

    async def _patiently(
        self,
        path: str,
        send: Callable[[], Awaitable[ServerResponse]],
        retry_s: float,
        passing: frozenset[int] = _PASSING,
    ) -> ServerResponse:
        """Send again, with growing pauses, until there is an answer or the time is up."""
        deadline = time.monotonic() + retry_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                answer = await send()
                if answer.status not in passing:
                    self._note_success()
                    return answer
                failure = answer.reason
            except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
                failure = self._hide_key(str(error)) or type(error).__name__
            if time.monotonic() + pause > deadline:
                raise EngineError(
                    f"`{self.url}{path}` does not answer: {failure}",
                    hint="look at the server's log; `--engine.retry_s` is how long a restart may take",
                )
            self._note_failure(failure, retry_s)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        timeout_s: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> ServerResponse:
        request = self._session.request(method, self.url + path, json=body, headers=headers)
        async with asyncio.timeout(timeout_s), request as response:
            text = self._hide_key(await response.text(errors="replace"))
        try:
            return ServerResponse(response.status, json.loads(text))
        except ValueError:
            return ServerResponse(response.status, text)

    async def _send_watched(self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None) -> ServerResponse:
        task = asyncio.create_task(self._send("POST", path, body, None, headers))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller and caller.cancelling():
                raise
            raise ConnectionAbortedError("the server stopped listening before it had answered") from None

    async def _watch(self) -> None:
        """Give up what is under way once nobody listens any more.

        A vLLM that is told to stop waits for its clients to hang up, but has stopped to sample for them: both sides
        would wait for ever.
        """
        while self._under_way:
            await asyncio.sleep(self._watch_s)
            try:
                await self._send("GET", "/v1/models", None, CONTROL_TIMEOUT_S)
            except aiohttp.ClientConnectorError:
                for task in self._under_way:
                    task.cancel()
            except (aiohttp.ClientError, OSError) as error:  # it is there, and may have much to do
                logger.debug("%s is slow to answer: %s", self.url, error)

    def _hide_key(self, text: str) -> str:
        return text.replace(self._api_key, "***") if self._api_key else text

    def _note_failure(self, failure: str, retry_s: float) -> None:
        """Say it once, however many calls wait."""
        if self._failing_since is None:
            logger.warning("%s does not answer, asking again for %g s: %s", self.url, retry_s, failure)
            self._failing_since = time.monotonic()

    def _note_success(self) -> None:
        if self._failing_since is not None:
            logger.warning("%s answers again", self.url)
            self._down_s, self._failing_since = self.down_s, None


def read_key(variable: str | None, environment: Mapping[str, str]) -> str | None:
    """The API key in this environment variable; None if the settings name none."""
    if variable is None:
        return None
    if not (key := environment.get(variable, "").strip()):
        raise DockyardError(
            f"the environment variable `{variable}`, which `engine.api_key_env` names, is not set",
            hint=f"`export {variable}=...` before the run; the key itself does not belong into the settings",
        )
    return key
