"""What runs on Modal: one function that serves a run's policy, and one that is a whole run.

Imported on both sides. Our source is laid over an image that has what the lock file says.
"""

import asyncio
import os
import socket
from pathlib import Path

import modal

from dockyard.backends.modal.whole_run import train_in

MOUNT = Path(os.environ.get("DOCKYARD_MODAL_MOUNT", "/dockyard"))
"""Where functions find the volume."""
VOLUME = "dockyard"
GPU = "H100"
DAY_S = 24 * 3600
IDLE_S = 1800.0
SOURCE = Path(__file__).parents[3]
_ENVIRONMENT = {
    "PYTHONPATH": "/root/src",
    "DOCKYARD_CACHE": str(MOUNT / "cache"),
    "HF_HOME": str(MOUNT / "hf"),  # models are fetched once
    "HARBOR_TELEMETRY": "off",
    "TOKENIZERS_PARALLELISM": "false",
}


def with_source(image: modal.Image) -> modal.Image:
    """This image with our source in it."""
    return image.env(_ENVIRONMENT).add_local_dir(SOURCE, "/root/src", ignore=["**/__pycache__"])


def locked_image(extras: list[str]) -> modal.Image:
    """The versions of our lock file. Over there the image is what it is."""
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
    """Serve one run's policy, and tell where on the board. Ends when nobody asks for it any more."""
    from dockyard.backends.modal.policy import keep_policy  # needs torch

    with socket.create_server(("0.0.0.0", 0)) as listener, modal.forward(listener.getsockname()[1]) as tunnel:
        board.put("url", tunnel.url)
        try:
            asyncio.run(keep_policy(listener, token, idle_s=IDLE_S))
        except OSError as error:  # which to the caller would be one of its own network
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
    """`dockyard train` in the volume; the exit code. Begun again, it resumes."""
    code = train_in(MOUNT / "runs" / name, words, modal.forward, resume=resume)
    volume.commit()
    return code
