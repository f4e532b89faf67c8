"""A web server on Modal: vLLM behind Dockyard's gateway, with every dialect, tool calls, and optionally an adapter.

Environment variables at deployment time choose what it serves.
"""

# pyright: reportUnknownMemberType=false
# Some of Modal's own types are incomplete.

import logging
import os
import shlex
import subprocess
import threading
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import modal

from dockyard.backends.modal.app import DAY_S, GPU, MOUNT, SOURCE, volume, with_source
from dockyard.backends.modal.whole_run import DOCKYARD, free_port
from dockyard.engine.remote_engine import adapter_rank
from dockyard.engine.vllm import VLLMWire
from dockyard.errors import DockyardError

logger = logging.getLogger(__name__)

MODEL, ADAPTER = "DOCKYARD_MODAL_MODEL", "DOCKYARD_MODAL_ADAPTER"
GPU_VARIABLE, SECRETS, PORT = "DOCKYARD_MODAL_GPU", "DOCKYARD_MODAL_SECRETS", "DOCKYARD_MODAL_PORT"
DEFAULT_MODEL = "Qwen/Qwen2.5-Coder-7B-Instruct"
DEFAULT_SECRET = "dockyard-server"
_VLLM = "vllm==0.32.0"
_PORT = int(os.environ.get(PORT, "8000"))
_SECRETS = [name for name in os.environ.get(SECRETS, DEFAULT_SECRET).split(",") if name]
_KEY_VARIABLE = "DOCKYARD_API_KEY"
_DEFAULT_RANK = 64
_START_TIMEOUT_S = 1800.0
_PAUSE_S = 0.5

app = modal.App("dockyard-server", include_source=False)


def _image() -> modal.Image:
    """Install vLLM in a separate environment, because it needs another torch than the lock file."""
    base = modal.Image.from_registry("nvidia/cuda:12.8.1-devel-ubuntu22.04", add_python="3.12")
    if not modal.is_local():
        return base
    return with_source(
        base.run_commands("pip install uv", f"uv venv /opt/vllm && uv pip install --python /opt/vllm {_VLLM}")
        .uv_sync(str(SOURCE.parent), extras=["modal"], extra_options="--no-dev")
        .run_commands("ln -s /opt/vllm/bin/vllm /usr/local/bin/vllm")
    )


@app.function(
    image=_image(),
    gpu=os.environ.get(GPU_VARIABLE, GPU),
    volumes={str(MOUNT): volume},
    secrets=[modal.Secret.from_name(name) for name in _SECRETS],
    env={name: os.environ[name] for name in (MODEL, ADAPTER) if name in os.environ},
    timeout=DAY_S,
    scaledown_window=900,
    max_containers=1,
)
@modal.concurrent(max_inputs=256)
@modal.web_server(_PORT, startup_timeout=1800)
def serve() -> None:
    """Start the server. Modal waits for the port."""
    adapter = os.environ.get(ADAPTER)
    arguments = (os.environ.get(MODEL, DEFAULT_MODEL), MOUNT / adapter if adapter else None)
    threading.Thread(target=_serve_or_end, args=arguments).start()


def _serve_or_end(model: str, adapter: Path | None) -> None:
    try:
        serve_both(model, _PORT, adapter)
    except Exception:  # a container that serves nothing must be replaced, whatever the reason
        logger.exception("the server ended")
    os._exit(1)


def serve_both(model: str, port: int, adapter: Path | None) -> None:
    """Serve until vLLM or the gateway exits, which raises an error."""
    if not os.environ.get(_KEY_VARIABLE):
        hint = f"`modal secret create {DEFAULT_SECRET} {_KEY_VARIABLE}=...`, then deploy again"
        raise DockyardError(f"`{_KEY_VARIABLE}` is not set: anybody who finds the server could use it", hint=hint)
    engine_port = free_port()
    vllm = _start_vllm(model, engine_port, adapter_rank(adapter) if adapter else _DEFAULT_RANK)
    both = [vllm]
    try:
        _wait_for(vllm, f"http://127.0.0.1:{engine_port}/v1/models")
        options = ["--host=0.0.0.0", f"--port={port}", "--engine=vllm", f"--engine-url=http://127.0.0.1:{engine_port}"]
        loaded = [f"--adapter={adapter}"] if adapter else []
        both.append(subprocess.Popen([*DOCKYARD, "serve", model, *options, *loaded]))
        while all(process.poll() is None for process in both):
            time.sleep(_PAUSE_S)
    finally:
        for process in both:
            process.kill()
            process.wait()
    raise DockyardError("the server ended", hint="the last lines of its output say why")


def _start_vllm(model: str, port: int, rank: int) -> subprocess.Popen[bytes]:
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
