"""Commands in a container. One that takes too long, or is not wanted any more, is ended inside as well as out here."""

# pyright: reportMissingTypeStubs=false

import asyncio
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from secrets import token_hex

from harbor.environments.base import ExecResult, OutputCallback

from dockyard.rollout.docker.engine import docker
from dockyard.rollout.docker.guard import require_running
from dockyard.rollout.faults import SandboxDiedError
from dockyard.rollout.output import Output

TIMED_OUT = 124
KILLED = 137
MARK = "DOCKYARD_COMMAND"
"""Whatever a command starts has this variable."""
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
"""What the docker client, Go's library or the loader reads: set for a command, it must not be set for the client."""
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
    """By bash. SandboxDiedError when the container ended, DockerUnreachableError when the engine did."""
    mark = f"{MARK}={token_hex(8)}"
    args = ["exec", "--env", mark]
    args += ["--workdir", cwd] if cwd else []
    args += ["--user", str(user)] if user is not None else []
    by_name = {key: value for key, value in env.items() if not _CLIENT.fullmatch(key)}  # values are in no process list
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
    except TimeoutError:  # not passed on: Harbor would take it for the agent's own time limit
        await _end_inside(container, mark)
        stderr.write(f"\n[killed after {timeout_s:g} s]\n".encode())
        code = TIMED_OUT
    except asyncio.CancelledError:
        await asyncio.shield(_end_inside(container, mark))
        raise
    result = ExecResult(stdout=stdout.text(), stderr=stderr.text(), return_code=code)
    if code == KILLED or (code and any(words in stderr.text() for words in _ENGINE_SAYS)):
        await require_running(container)  # the words may be the command's own: only the engine's count
    if on_output is not None:
        await _tell(on_output, result)
    return result


async def _tell(on_output: OutputCallback, result: ExecResult) -> None:
    if result.stdout:
        await on_output(result.stdout, "stdout")
    if result.stderr:
        await on_output(result.stderr, "stderr")


async def _end_inside(container: str, mark: str) -> None:
    """As well as it goes: what hides from this ends at the seal."""
    with suppress(TimeoutError, SandboxDiedError):
        await docker("exec", "--user", "0", container, "sh", "-c", _END, "sh", mark, timeout_s=_END_WITHIN_S)
