"""HTTP requests as bytes, so that they can be wrong in every way, cut short, or left alone half-way."""

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True)
class RawRequest:
    """What goes over the wire."""

    method: str = "POST"
    path: str = "/v1/chat/completions"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    announced: int | None = None
    """The content length to claim; None for the true one, -1 for none at all."""
    num_sent: int | None = None
    """How many bytes are sent before the client hangs up; None for all."""
    hangs_up_after_s: float | None = None
    """How long the client waits for an answer; None for as long as it takes."""

    def data(self) -> bytes:
        length = len(self.body) if self.announced is None else self.announced
        lines = [f"{self.method} {self.path} HTTP/1.1", "Host: x", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        lines += [f"Content-Length: {length}"] if length >= 0 else []
        return "\r\n".join([*lines, "", ""]).encode("latin-1", errors="replace") + self.body


@dataclass(frozen=True)
class RawAnswer:
    """What came back."""

    status: int
    head: str
    """Without the date."""
    body: bytes


async def exchange(port: int, request: RawRequest) -> RawAnswer | None:
    """Send it; None if the client does not wait for an answer, or gets none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = request.data()
    try:
        writer.write(data if request.num_sent is None else data[: request.num_sent])
        await writer.drain()
        if request.num_sent is not None or request.hangs_up_after_s is not None:
            await asyncio.sleep(request.hangs_up_after_s or 0)
            writer.transport.abort()
            return None
        async with asyncio.timeout(300):  # only against hanging
            return _parsed(await reader.read())
    except ConnectionError:
        return None
    finally:
        writer.close()


def _parsed(data: bytes) -> RawAnswer | None:
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    if not lines[0].startswith("HTTP/1.1 "):
        return None
    kept = [line for line in lines if not line.startswith("Date:")]
    return RawAnswer(int(lines[0].split()[1]), "\n".join(kept), body)
