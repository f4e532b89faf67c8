"""`serve_both` as a web server on Modal. Environment variables at deployment time choose what it serves."""

# pyright: reportUnknownMemberType=false
# Some of Modal's own types are incomplete.

import logging
import os
import threading
from pathlib import Path

import modal

from dockyard.backends.modal.app import DAY_S, GPU, MOUNT, SOURCE, VOLUME, with_source
from dockyard.backends.modal.server import serve_both

logger = logging.getLogger(__name__)

MODEL, ADAPTER = "DOCKYARD_MODAL_MODEL", "DOCKYARD_MODAL_ADAPTER"
GPU_VARIABLE, SECRETS, PORT = "DOCKYARD_MODAL_GPU", "DOCKYARD_MODAL_SECRETS", "DOCKYARD_MODAL_PORT"
DEFAULT_MODEL = "Qwen/Qwen2.5-Coder-7B-Instruct"
DEFAULT_SECRET = "dockyard-server"
_VLLM = "vllm==0.32.0"
_PORT = int(os.environ.get(PORT, "8000"))
_SECRETS = [name for name in os.environ.get(SECRETS, DEFAULT_SECRET).split(",") if name]

app = modal.App("dockyard-server", include_source=False)
volume = modal.Volume.from_name(VOLUME, create_if_missing=True)


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
