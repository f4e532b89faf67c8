"""Run commands in a container and copy files into and out of it.

A command that times out or is cancelled is killed inside the container as well as here. Files are copied by the Docker
engine, without any program inside. Links are not copied out, because Harbor reads downloads on this machine.
"""

import asyncio
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import IO

from harbor.environments.base import ExecResult, OutputCallback

from dockyard.process import Output
from dockyard.rollout.blame import DockerUnreachableError, SandboxDiedError
from dockyard.rollout.docker.docker_cli import docker, short
from dockyard.rollout.docker.guard import require_running
from dockyard.rollout.sandbox import transfer

# pyright: reportMissingTypeStubs=false


TIMED_OUT = 124
KILLED = 137
MARK = "DOCKYARD_COMMAND"
"""Environment variable of a command and of every process that it starts."""
_END_WITHIN_S = 10.0
_END = """
for round in 1 2; do
  for process in /proc/[0-9]*; do
    if grep -q "$1" "$process/environ" 2>/dev/null; then kill -9 "${process#/proc/}"; fi
  done
done
"""
_CLIENT = re.compile(
    r"PATH|HOME|USER|PWD|TMPDIR|TZ|ZONEINFO|LOCALDOMAIN|RES_OPTIONS|HOSTALIASES|REQUEST_METHOD"
    r"|(DOCKER|BUILDX|BUILDKIT|COMPOSE|LD|GLIBC|MALLOC|SSL|XDG|OTEL)_.*|SSH_(AUTH_SOCK|ASKPASS.*)|GO[A-Z]+|.*_PROXY",
    re.IGNORECASE,
)
"""Variables that the docker client, Go's library or the loader read: set for the command, never for the client."""
_ENGINE_SAYS = ("Error response from daemon", "Cannot connect to the Docker daemon")


async def run(
    container: str,
    command: str,
    *,
    cwd: str | None,
    env: Mapping[str, str],
    user: str | int | None,
    timeout_s: float | None,
    on_output: OutputCallback | None = None,
) -> ExecResult:
    """Run a command by bash. Raise SandboxDiedError if the container ended, DockerUnreachableError if Docker did."""
    mark = f"{MARK}={token_hex(8)}"
    args = ["exec", "--env", mark]
    args += ["--workdir", cwd] if cwd else []
    args += ["--user", str(user)] if user is not None else []
    by_name = {key: value for key, value in env.items() if not _CLIENT.fullmatch(key)}  # process lists show no values
    args += [arg for key, value in env.items() for arg in ("--env", key if key in by_name else f"{key}={value}")]
    stdout, stderr = Output(), Output()
    try:
        done = await docker(
            *(*args, container, "bash", "-c", command),
            env={**os.environ, **by_name},
            stdout=stdout,
            stderr=stderr,
            timeout_s=timeout_s,
        )
        code = done.code
    except TimeoutError:  # not passed on: Harbor would take it for the agent's time limit
        await _end_inside(container, mark)
        stderr.write(f"\n[killed after {timeout_s:g} s]\n".encode())
        code = TIMED_OUT
    except asyncio.CancelledError:
        await asyncio.shield(_end_inside(container, mark))
        raise
    result = ExecResult(stdout=stdout.text(), stderr=stderr.text(), return_code=code)
    if code == KILLED or (code and any(words in stderr.text() for words in _ENGINE_SAYS)):
        await require_running(container)  # the command itself may have printed these words, so ask the engine
    if on_output is not None:
        await _forward_output(on_output, result)
    return result


async def _forward_output(on_output: OutputCallback, result: ExecResult) -> None:
    if result.stdout:
        await on_output(result.stdout, "stdout")
    if result.stderr:
        await on_output(result.stderr, "stderr")


async def _end_inside(container: str, mark: str) -> None:
    """Kill the command's processes as far as they can be found. The seal kills the rest."""
    with suppress(TimeoutError, SandboxDiedError):
        await docker("exec", "--user", "0", container, "sh", "-c", _END, "sh", mark, timeout_s=_END_WITHIN_S)


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
        raise RuntimeError(f"`docker cp {source} {target}`: did not finish within {TRANSFER_TIMEOUT_S} s") from None
    if done.is_unreachable:
        raise DockerUnreachableError(short(done.stderr))
    if done.code != 0:
        raise RuntimeError(f"`docker cp {source} {target}`: {short(done.stderr)}")
