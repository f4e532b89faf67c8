"""A tunnel from the world to the gateway: a command of the user's that prints its URL and runs until it is ended.

Such commands print other URLs too, of their terms and manuals. The tunnel's is the one where the gateway answers.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
from yarl import URL

from dockyard.errors import DockyardError
from dockyard.interrupt import ends_with

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
_PROBE_TIMEOUT_S = 10.0
_PAUSE_S = 0.5
_URL = re.compile(r"https?://[\w.:\[\]-]+")


@asynccontextmanager
async def open_tunnel(command: str, port: int, patience_s: float = PATIENCE_S) -> AsyncGenerator[str]:
    """The tunnel's URL. The command, with all it started, ends with the block."""
    process = await asyncio.create_subprocess_shell(
        command.replace("{port}", str(port)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    heard: list[str] = []
    reading = asyncio.create_task(_listen(process.stdout, heard))  # to its end: a full pipe would stop the tunnel
    try:
        url = await _find(process, heard, port, patience_s)
        if url is None:
            raise DockyardError(
                f"`gateway.tunnel` is `{command}`, which opened no way to the gateway in {patience_s:g} s: "
                + (" / ".join(heard[-3:]) or "it printed nothing"),
                hint="run it by hand, or open a tunnel yourself and name it by `--gateway.public_url`",
            )
        logger.info("agents reach the gateway at %s", url)
        async with ends_with(process, lambda: _ended(process, command)):
            yield url
    finally:
        reading.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _ended(process: asyncio.subprocess.Process, command: str) -> DockyardError:
    """Agents without a way to their model would count as crashed."""
    message = f"`gateway.tunnel` ended with code {process.returncode} in the middle of the run"
    return DockyardError(message, hint=f"run `{command}` by hand; `--resume` continues the run")


async def _listen(output: asyncio.StreamReader, heard: list[str]) -> None:
    async for raw in output:
        if len(heard) < 1000 and (line := raw.decode(errors="replace").strip()):
            heard.append(line)


async def _find(process: asyncio.subprocess.Process, heard: list[str], port: int, patience_s: float) -> str | None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s), aiohttp.ClientSession(trust_env=True) as client:
            while process.returncode is None:
                printed = dict.fromkeys(url.rstrip(".:") for line in list(heard) for url in _URL.findall(line))
                for url in printed:
                    if _port(url) != port and await _is_gateway(client, url):
                        return url
                await asyncio.sleep(_PAUSE_S)
    return None


def _port(url: str) -> int | None:
    try:
        return URL(url).port
    except ValueError:
        return None


async def _is_gateway(client: aiohttp.ClientSession, url: str) -> bool:
    """Whoever knocks without a key is told that it is not valid."""
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S), client.get(f"{url}/v1/models") as response:
            return response.status == 401 and "invalid_api_key" in await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return False
