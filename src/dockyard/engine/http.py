"""A model server over HTTP. Calls are retried for a limited time after temporary failures, such as a restart."""

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

CONTROL_TIMEOUT_S = 120.0  # for every call except generation, which has no limit
_CONNECT_TIMEOUT_S = 10.0
_KEEP_ALIVE_S = 2.0  # uvicorn (vLLM, SGLang) closes idle connections after 5 s, which would lose a call
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
_WATCH_S = 5.0
_TEMPORARY = frozenset({429, 500, 502, 503, 504})
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class ServerResponse:
    """A server's response. `body` is its JSON, or its text if it is not JSON."""

    status: int
    body: Any

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def reason(self) -> str:
        """The error message of the response in one line. Servers use different fields for it."""
        found: Any = self.body
        for key in ("error", "error_message", "message", "detail"):
            if isinstance(found, dict) and key in found:
                found = cast(Any, found[key])
        text = found if isinstance(found, str) else json.dumps(found)
        return f"HTTP {self.status}: {' '.join(text.split())[:300]}"


class ModelServer:
    """One server at one address. It must be created inside an event loop."""

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
            trust_env=URL(self.url).host not in _LOOPBACK,  # proxies in the environment are for other hosts
        )

    @property
    def down_s(self) -> float:
        """The total time in seconds in which it did not answer."""
        return self._down_s + (time.monotonic() - self._failing_since if self._failing_since is not None else 0.0)

    async def get(self, path: str, *, patient: bool = True) -> ServerResponse:
        """Send a GET request. Without `patient` there are no retries."""
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
        """Send JSON. The statuses in `final` are not retried."""
        send = partial(self._send, "POST", path, body, timeout_s)
        return await self._patiently(path, send, self._retry_s if patient else 0, _TEMPORARY - final)

    async def generate(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> ServerResponse:
        """Send JSON and wait for the answer without a time limit, as long as the server is up."""
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
        temporary: frozenset[int] = _TEMPORARY,
    ) -> ServerResponse:
        """Retry with growing pauses until there is an answer or the time is up."""
        deadline = time.monotonic() + retry_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                answer = await send()
                if answer.status not in temporary:
                    self._note_success()
                    return answer
                failure = answer.reason
            except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
                failure = self._hide_key(str(error)) or type(error).__name__
            if time.monotonic() + pause > deadline:
                raise EngineError(
                    f"`{self.url}{path}` does not answer: {failure}",
                    hint="see the server's log; `--engine.retry_s` is how long a restart may take",
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
        """Cancel the calls in progress once the server no longer listens.

        A vLLM server that is shutting down waits for its clients to disconnect but no longer samples for them, so both
        sides would wait forever.
        """
        while self._under_way:
            await asyncio.sleep(self._watch_s)
            try:
                await self._send("GET", "/v1/models", None, CONTROL_TIMEOUT_S)
            except aiohttp.ClientConnectorError:
                for task in self._under_way:
                    task.cancel()
            except (aiohttp.ClientError, OSError) as error:  # it is up, and may be busy
                logger.debug("%s is slow to answer: %s", self.url, error)

    def _hide_key(self, text: str) -> str:
        return text.replace(self._api_key, "***") if self._api_key else text

    def _note_failure(self, failure: str, retry_s: float) -> None:
        """Log the failure once, however many calls are waiting."""
        if self._failing_since is None:
            logger.warning("%s does not answer, retrying for %g s: %s", self.url, retry_s, failure)
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
            hint=f"`export {variable}=...` before the run; the key itself does not belong in the settings",
        )
    return key
