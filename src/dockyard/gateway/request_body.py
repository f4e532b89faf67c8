"""Reads and parses the body of a request, within a limit of size and time."""

import asyncio
import json
import re

from aiohttp import web

from dockyard.gateway.protocol import RefusedError

BODY_LIMIT = 16 * 2**20
"""In bytes."""


async def read_body(request: web.Request, timeout_s: float) -> bytearray:
    """Read the whole body. Raises `RefusedError` if it is too large, incomplete or too slow."""
    if (request.content_length or 0) > BODY_LIMIT:
        raise _too_large()
    try:
        async with asyncio.timeout(timeout_s):
            return await _whole_body(request)
    except TimeoutError as error:
        raise RefusedError(408, "timeout", "the body did not arrive in time") from error
    except web.RequestPayloadError as error:
        raise RefusedError(400, "invalid_request", f"the body cannot be read: {error}") from error


def parse_body(raw: bytes | bytearray) -> object:
    """Parse a body. Half a surrogate pair, which agents send for bytes that are not text, becomes a question mark."""
    text = raw.decode(errors="replace")
    try:
        value = json.loads(text)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "invalid_request", f"the body is not JSON: {error}") from error
    return value


async def _whole_body(request: web.Request) -> bytearray:
    """Read without `request.read()`, which keeps the body in memory until the connection's next request."""
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > BODY_LIMIT:
            raise _too_large()
    return body


def _too_large() -> RefusedError:
    return RefusedError(413, "body_too_large", f"the body is larger than {BODY_LIMIT} bytes")
