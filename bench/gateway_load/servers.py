"""The servers under load, each in its own process, and the resources of that process."""

import asyncio
import ctypes
import gc
import multiprocessing
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from tokenizers import Tokenizer

from dockyard.engine.protocol import GenerateRequest, Generation
from dockyard.gateway.accounting import Recording
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.server import Gateway
from dockyard.gateway.sessions import Session, TokenSessions
from dockyard.types import Finish, IntArray

from .agents import MODEL, dump

THOUGHT = "The failing test points at the parser, so I read its module before I change anything."
SAID = "Let me look at the module first."
ARGUMENTS = '{"path": "/app/src/caf\\u00e9/parser.py",  "limit": 200.0, "pattern": "def parse_[a-z]+\\\\(" }'
CALL = f'<tool_call>\n{{"name": "tool_7", "arguments": {ARGUMENTS}}}\n</tool_call>'
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>")


@dataclass
class Server:
    """A process under load."""

    name: str
    url: str
    pid: int
    pipe: Connection | None = None
    """To a gateway of ours."""
    key: str = ""
    """Of a server without sessions."""

    def keys(self, count: int) -> list[str]:
        return self._order("open", count) if self.pipe else [self.key] * count

    def close_sessions(self) -> list[Recording]:
        return self._order("close") if self.pipe else []

    def cpu_s(self) -> float:
        """CPU time of all threads, user and system. The clock id is that of Linux's `clock_getcpuclockid`."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def resident_mb(self) -> float:
        num_pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return num_pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def held_mb(self) -> float:
        """Resident memory without what the allocator keeps for reuse."""
        self._order("trim")
        return self.resident_mb()

    def _order(self, *order: object) -> Any:
        assert self.pipe
        self.pipe.send(order)
        return self.pipe.recv()


@asynccontextmanager
async def own_process(name: str, serve: Callable[..., None], *arguments: object) -> AsyncGenerator[Server]:
    """Run `serve(pipe, *arguments)`, which sends its URL when it listens."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, *arguments), daemon=True)
    process.start()
    try:
        url = await asyncio.to_thread(here.recv)
        assert process.pid
        yield Server(name, url, process.pid, here if serve is serve_gateway else None)
    finally:
        process.terminate()
        process.join()


class InstantEngine:
    """Implements `dockyard.engine.protocol.Engine`: the same reply each time, in a non-canonical tokenization."""

    context_length = 131_072
    version = 0
    down_s = 0.0

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = _cut(f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{CALL}<|im_end|>")
        self._ids = np.array([token_id for piece in pieces for token_id in tokenizer.encode(piece).ids], np.int32)

    async def generate(self, request: GenerateRequest) -> Generation:
        count = len(self._ids)
        return Generation(
            token_ids=self._ids.copy(),
            logprobs=np.full(count, -0.5, np.float32),
            versions=np.zeros(count, np.int32),
            finish=Finish.STOP,
        )

    async def publish(self, adapter_dir: Path, version: int) -> None: ...

    async def close(self) -> None: ...


def _cut(text: str) -> list[str]:
    """Split into pieces of three characters; control tokens stay whole, as a model samples them."""
    pieces: list[str] = []
    while text:
        mark = next((mark for mark in MARKS if text.startswith(mark)), None)
        to_mark = [at for mark in MARKS if (at := text.find(mark)) > 0]
        pieces.append(mark or text[: min([3, *to_mark])])
        text = text[len(pieces[-1]) :]
    return pieces


class Rerenderer(Renderer):
    """Renders and tokenizes the whole history each time, as a stateless server does."""

    def extend(self, prefix: object, calls: object, new: object, tools: object) -> IntArray | None:
        return None


def serve_gateway(pipe: Connection, kind: type[Renderer], folder: Path) -> None:
    asyncio.run(_serve_gateway(pipe, kind, folder))


async def _serve_gateway(pipe: Connection, kind: type[Renderer], folder: Path) -> None:
    engine = InstantEngine(Tokenizer.from_file(str(folder / "tokenizer.json")))
    gateway = Gateway(TokenSessions(engine, kind.load(folder, "Qwen/Qwen3-8B")), MODEL)
    await gateway.start()
    orders = _Orders(gateway)

    def obey() -> None:
        order, *arguments = pipe.recv()
        pipe.send(getattr(orders, order)(*arguments))

    asyncio.get_running_loop().add_reader(pipe.fileno(), obey)
    pipe.send(gateway.url)
    await asyncio.Event().wait()


class _Orders:
    """The commands that a `Server` sends to its gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._sessions: list[Session] = []

    def open(self, count: int) -> list[str]:
        sampling = {"temperature": 1.0, "max_new_tokens": 4096}
        new = [self._gateway.open_session(f"r{number}", seed=number, **sampling) for number in range(count)]
        self._sessions += new
        return [session.key for session in new]

    def close(self) -> list[Recording]:
        records = [self._gateway.close_session(session) for session in self._sessions]
        self._sessions.clear()
        return records

    def trim(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def serve_stub(pipe: Connection) -> None:
    asyncio.run(_serve_stub(pipe))


async def _serve_stub(pipe: Connection) -> None:
    """Run an OpenAI server that reads the request and answers with the engine's turn."""
    events = _stub_events()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=events, content_type="text/event-stream")

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    await asyncio.Event().wait()


def _stub_events() -> bytes:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "tool_7", "arguments": ARGUMENTS}}
    delta = {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT, "tool_calls": [call]}
    bodies: Sequence[dict[str, Any]] = (
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"prompt_tokens": 17000, "completion_tokens": 138, "total_tokens": 17138}},
    )
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    return b"".join(b"data: " + dump(head | body) + b"\n\n" for body in bodies) + b"data: [DONE]\n\n"
