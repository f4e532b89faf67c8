"""The functions that run on Modal: one serves the policy of a run, the other is a whole run.

Imported on both sides. The image has the packages of the lock file, and Dockyard's source is added to it.
"""

import asyncio
import os
import socket
from pathlib import Path

import modal

from dockyard.backends.modal.whole_run import train_in

MOUNT = Path(os.environ.get("DOCKYARD_MODAL_MOUNT", "/dockyard"))
"""Where the volume is mounted."""
VOLUME = "dockyard"
GPU = "H100"
DAY_S = 24 * 3600
IDLE_S = 1800.0
SOURCE = Path(__file__).parents[3]
_ENVIRONMENT = {
    "PYTHONPATH": "/root/src",
    "DOCKYARD_CACHE": str(MOUNT / "cache"),
    "HF_HOME": str(MOUNT / "hf"),  # models are downloaded once
    "HARBOR_TELEMETRY": "off",
    "TOKENIZERS_PARALLELISM": "false",
}


def with_source(image: modal.Image) -> modal.Image:
    """Return the image with Dockyard's source added."""
    return image.env(_ENVIRONMENT).add_local_dir(SOURCE, "/root/src", ignore=["**/__pycache__"])


def locked_image(extras: list[str]) -> modal.Image:
    """Return an image with the versions of the lock file. On Modal it exists already."""
    slim = modal.Image.debian_slim(python_version="3.12")
    if not modal.is_local():
        return slim
    return with_source(slim.apt_install("git").uv_sync(str(SOURCE.parent), extras=extras, extra_options="--no-dev"))


app = modal.App("dockyard", include_source=False)
volume = modal.Volume.from_name(VOLUME, create_if_missing=True)
_image = locked_image(["demo", "modal", "daytona", "qlora"])


@app.function(
    image=_image, gpu=GPU, volumes={str(MOUNT): volume}, timeout=DAY_S, single_use_containers=True, memory=32768
)
def serve_policy(token: str, board: modal.Dict) -> None:
    """Serve the policy of one run and put its URL on the board. Ends after `IDLE_S` without calls."""
    from dockyard.backends.modal.policy import keep_policy  # needs torch

    with socket.create_server(("0.0.0.0", 0)) as listener, modal.forward(listener.getsockname()[1]) as tunnel:
        board.put("url", tunnel.url)
        try:
            asyncio.run(keep_policy(listener, token, idle_s=IDLE_S))
        except OSError as error:  # the caller would take it for an error of its own network
            raise RuntimeError(f"{type(error).__name__}: {error}") from error


@app.function(
    image=_image,
    gpu=GPU,
    volumes={str(MOUNT): volume},
    timeout=DAY_S,
    single_use_containers=True,
    memory=32768,
    retries=modal.Retries(max_retries=10, initial_delay=1.0, backoff_coefficient=1.0),
)
def train_there(words: list[str], name: str, resume: bool) -> int:
    """Run `dockyard train` in the volume and return its exit code. A retry resumes the run."""
    code = train_in(MOUNT / "runs" / name, words, modal.forward, resume=resume)
    volume.commit()
    return code
