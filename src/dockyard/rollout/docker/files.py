"""Files into and out of a container, through the engine: no program inside takes part.

Links are left out on the way out, because Harbor reads what it downloaded on this machine.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import IO

from dockyard.rollout.docker.engine import docker, short
from dockyard.rollout.faults import DockerUnreachableError
from dockyard.rollout.sandbox import transfer

MAX_DOWNLOAD_BYTES = 256 << 20
TRANSFER_TIMEOUT_S = 600


async def upload(source: str, container: str, target: str) -> None:
    await _copy(source, f"{container}:{target}")


async def download_file(container: str, source: str, target: Path) -> None:
    with tempfile.TemporaryFile() as archive:
        await _fetch(container, source, archive)
        await asyncio.to_thread(transfer.unpack_one, archive, target)


async def download_folder(container: str, source: str, target: Path) -> None:
    with tempfile.TemporaryFile() as archive:
        await _fetch(container, f"{source.rstrip('/')}/.", archive)
        await asyncio.to_thread(transfer.unpack, archive, target)


async def _fetch(container: str, source: str, archive: IO[bytes]) -> None:
    download = transfer.Download(archive, MAX_DOWNLOAD_BYTES)
    try:
        await _copy(f"{container}:{source}", "-", download)
    except RuntimeError:
        if not download.is_full:
            raise
    if download.is_full:
        raise RuntimeError(f"`{source}` is larger than {MAX_DOWNLOAD_BYTES >> 20} MB")


async def _copy(source: str, target: str, sink: transfer.Download | None = None) -> None:
    try:
        done = await docker("cp", source, target, stdout=sink, timeout_s=TRANSFER_TIMEOUT_S)
    except TimeoutError:
        raise RuntimeError(f"`docker cp {source} {target}`: not done after {TRANSFER_TIMEOUT_S} s") from None
    if done.is_unreachable:
        raise DockerUnreachableError(short(done.stderr))
    if done.code != 0:
        raise RuntimeError(f"`docker cp {source} {target}`: {short(done.stderr)}")
