"""vLLM behind Dockyard's gateway in one container: every dialect, tool calls, and optionally a LoRA adapter."""

import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from dockyard.engine.remote_engine import adapter_rank
from dockyard.engine.vllm import VLLMWire
from dockyard.errors import DockyardError

KEY_VARIABLE = "DOCKYARD_API_KEY"
_SERVE = (sys.executable, "-c", "import sys; from dockyard.cli import main; sys.exit(main())", "serve")
_DEFAULT_RANK = 64
_START_TIMEOUT_S = 1800.0
_PAUSE_S = 0.5


def serve_both(model: str, port: int, adapter: Path | None) -> None:
    """Serve until vLLM or the gateway exits, which raises an error."""
    if not os.environ.get(KEY_VARIABLE):
        hint = f"`modal secret create dockyard-server {KEY_VARIABLE}=...`, then deploy again"
        raise DockyardError(f"`{KEY_VARIABLE}` is not set: anybody who finds the server could use it", hint=hint)
    engine_port = _free_port()
    vllm = start_vllm(model, engine_port, adapter_rank(adapter) if adapter else _DEFAULT_RANK)
    both = [vllm]
    try:
        _wait_for(vllm, f"http://127.0.0.1:{engine_port}/v1/models")
        engine = ["--engine=vllm", f"--engine-url=http://127.0.0.1:{engine_port}"]
        loaded = [f"--adapter={adapter}"] if adapter else []
        both.append(subprocess.Popen([*_SERVE, model, "--host=0.0.0.0", f"--port={port}", *engine, *loaded]))
        while all(process.poll() is None for process in both):
            time.sleep(_PAUSE_S)
    finally:
        for process in both:
            process.kill()
            process.wait()
    raise DockyardError("the server ended", hint="the last lines of its output say why")


def start_vllm(model: str, port: int, rank: int) -> subprocess.Popen[bytes]:
    """Start vLLM with the options that training uses, reachable by the gateway only."""
    setting, *command = shlex.split(VLLMWire().command(model, rank))
    name, _, value = setting.partition("=")
    here = ["--host", "127.0.0.1", "--port", str(port)]
    return subprocess.Popen([*command, *here], env=os.environ | {name: value})


def _wait_for(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urlopen(url, timeout=10):
                return
        except (URLError, OSError):
            time.sleep(_PAUSE_S)
    raise DockyardError(f"vLLM does not answer at `{url}`", hint="the last lines of its output say why")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
