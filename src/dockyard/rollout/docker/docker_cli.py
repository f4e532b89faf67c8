"""The `docker` command: run it, run commands in a container, copy files into and out of it, and read its state.

A command that times out or is cancelled leaves no process behind, neither here nor in the container. Files are copied
by the Docker engine, without any program inside. Links are not copied out, because Harbor reads downloads here.
"""

# pyright: reportMissingTypeStubs=false

import asyncio
import json
import os
import re
import shutil
import signal
import tarfile
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

from harbor.environments.base import ExecResult, OutputCallback

from dockyard.process import Output, Sink
from dockyard.rollout.blame import DockerUnreachableError, SandboxDiedError

ANSWER_WITHIN_S = 120.0
"""Time limit for the engine's own operations. Builds, pulls and commands in containers have their own limits."""
_END_WITHIN_S = 10.0  # a client that is asked to stop may finish its request to the engine
_CHUNK = 1 << 16
_UNREACHABLE = (
    "cannot connect to the docker daemon",
    "error during connect",
    "failed to connect to the docker api",
    "docker daemon is not running",
)
TIMED_OUT = 124
KILLED = 137
MARK = "DOCKYARD_COMMAND"
"""Environment variable of a command and of every process that it starts."""
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
MAX_DOWNLOAD_BYTES = 256 << 20
TRANSFER_TIMEOUT_S = 600


class DockerError(Exception):
    """The engine refused a command."""


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a command."""

    code: int
    stdout: str
    stderr: str

    def require_engine(self) -> None:
        """Raise DockerUnreachableError if the engine did not answer.

        Use only for commands of the client itself: a program in a container may print anything.
        """
        if self.code != 0 and any(sign in self.stderr.lower() for sign in _UNREACHABLE):
            raise DockerUnreachableError(short(self.stderr))


async def docker(
    *args: str,
    stdin: bytes | None = None,
    stdout: Sink | None = None,
    stderr: Sink | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    patience_s: float = 0.0,
) -> Done:
    """Run `docker ARGS`. Raise TimeoutError after `timeout_s`. The process is ended then, and on cancellation.

    `patience_s` is how long it may continue before it is ended: what the engine was asked to create would still appear.
    """
    out, err = Output(), Output()
    try:
        process = await asyncio.create_subprocess_exec(
            "docker",
            *args,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,  # compose is a child of `docker`: both must end together, and not by Ctrl-C
        )
    except FileNotFoundError as error:
        raise DockerUnreachableError("there is no `docker` command on PATH") from error
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(
                _feed(process.stdin, stdin),
                _pump(process.stdout, stdout or out, process.pid),
                _pump(process.stderr, stderr or err, process.pid),
            )
            code = await process.wait()
    finally:
        if process.returncode is None:
            await asyncio.shield(_end(process, patience_s))
    return Done(code, out.text(), err.text())


async def ask(*args: str, stdin: bytes | None = None) -> str:
    """Return the engine's answer. Raise DockerError if it refuses, DockerUnreachableError if it does not answer."""
    try:
        done = await docker(*args, stdin=stdin, timeout_s=ANSWER_WITHIN_S)
    except TimeoutError:
        await _require_answer()  # an agent may have caused the delay, for example with a million files
        raise DockerError(f"`docker {args[0]}` did not finish within {ANSWER_WITHIN_S:g} s") from None
    done.require_engine()
    if done.code != 0:
        raise DockerError(f"`docker {args[0]}`: {short(done.stderr) or f'return code {done.code}'}")
    return done.stdout.strip()


async def _require_answer() -> None:
    try:
        done = await docker("version", timeout_s=_END_WITHIN_S)
    except TimeoutError:
        raise DockerUnreachableError(f"`docker version` got no answer within {_END_WITHIN_S:g} s") from None
    if done.code != 0:
        raise DockerUnreachableError(short(done.stderr))


def short(text: str, num_lines: int = 1) -> str:
    """Return the last lines, which usually contain the error."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-num_lines:])


async def _feed(pipe: asyncio.StreamWriter | None, data: bytes | None) -> None:
    if pipe is None:
        return
    with suppress(BrokenPipeError, ConnectionResetError):
        pipe.write(data or b"")
        await pipe.drain()
    pipe.close()


async def _pump(pipe: asyncio.StreamReader | None, sink: Sink, pid: int) -> None:
    """Copy output to the sink. When the sink returns True, kill the command and read the rest of its output."""
    assert pipe is not None
    while data := await pipe.read(_CHUNK):
        if sink.write(data):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process, patience_s: float) -> None:
    if patience_s and await _has_ended(process, patience_s):
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if await _has_ended(process, _END_WITHIN_S):
            return


async def _has_ended(process: asyncio.subprocess.Process, within_s: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await process.wait()
    return process.returncode is not None


@dataclass(frozen=True, slots=True)
class State:
    """The state of a container as the engine reports it. The container cannot influence it."""

    image: str
    is_running: bool
    is_paused: bool
    was_out_of_memory: bool
    exit_code: int
    env: dict[str, str]
    programs: tuple[str, ...]
    """Programs that the engine runs in it: entrypoint, command, health check."""


async def read_state(container: str) -> State:
    try:
        facts: dict[str, Any] = json.loads(await ask("container", "inspect", container))[0]
    except DockerError as error:
        raise SandboxDiedError(f"the container no longer exists: {error}") from None
    state, config = facts["State"], facts["Config"]
    env: list[str] = config["Env"] or []
    check: dict[str, Any] = config.get("Healthcheck") or {}
    lines: list[str] = [*(config["Entrypoint"] or []), *(config["Cmd"] or []), *(check.get("Test") or [])]
    return State(
        image=facts["Image"],
        is_running=state["Running"],
        is_paused=state["Paused"],
        was_out_of_memory=state["OOMKilled"],
        exit_code=state["ExitCode"],
        env={name: value for name, _, value in (item.partition("=") for item in env)},
        programs=tuple(word for line in lines for word in line.split()),
    )


async def require_running(container: str) -> State:
    """Return the state. Raise SandboxDiedError with the reason if the container has ended."""
    state = await read_state(container)
    if not state.is_running:
        reason = "out of memory" if state.was_out_of_memory else "not stopped by Dockyard"
        raise SandboxDiedError(f"the container ended with code {state.exit_code} ({reason})")
    return state


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


class _Download:
    """A sink that keeps at most `MAX_DOWNLOAD_BYTES` in a file. A sparse file may claim any size."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._left = MAX_DOWNLOAD_BYTES

    @property
    def is_full(self) -> bool:
        return self._left == 0

    def write(self, data: bytes, /) -> bool:
        data = data[: self._left]
        self._left -= len(data)
        self._file.write(data)
        return self.is_full


async def upload(source: str, container: str, target: str) -> None:
    await _copy(source, f"{container}:{target}")


async def download_file(container: str, source: str, target: Path) -> None:
    with tempfile.TemporaryFile() as archive:
        await _fetch(container, source, archive)
        await asyncio.to_thread(_unpack_one, archive, target)


async def download_folder(container: str, source: str, target: Path) -> None:
    with tempfile.TemporaryFile() as archive:
        await _fetch(container, f"{source.rstrip('/')}/.", archive)
        await asyncio.to_thread(_unpack, archive, target)


async def _fetch(container: str, source: str, archive: IO[bytes]) -> None:
    download = _Download(archive)
    try:
        await _copy(f"{container}:{source}", "-", download)
    except RuntimeError:
        if not download.is_full:
            raise
    if download.is_full:
        raise RuntimeError(f"`{source}` is larger than {MAX_DOWNLOAD_BYTES >> 20} MB")


async def _copy(source: str, target: str, sink: _Download | None = None) -> None:
    try:
        done = await docker("cp", source, target, stdout=sink, timeout_s=TRANSFER_TIMEOUT_S)
    except TimeoutError:
        raise RuntimeError(f"`docker cp {source} {target}`: did not finish within {TRANSFER_TIMEOUT_S} s") from None
    done.require_engine()
    if done.code != 0:
        raise RuntimeError(f"`docker cp {source} {target}`: {short(done.stderr)}")


def _unpack(archive: IO[bytes], target: Path) -> None:
    """Unpack files and folders. Names that lead out of `target` are errors."""
    archive.seek(0)
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=archive, mode="r:") as members:
        for member in members:
            if member.isreg() or member.isdir():
                members.extract(member, target, filter="data")


def _unpack_one(archive: IO[bytes], target: Path) -> None:
    """Unpack the only member, which must be a file, to `target`, or under its own name if that is a folder."""
    archive.seek(0)
    with tarfile.open(fileobj=archive, mode="r:") as members:
        member = members.next()
        content = members.extractfile(member) if member is not None and member.isreg() else None
        if member is None or content is None:
            raise RuntimeError("not a file")
        target = target / member.name if target.is_dir() else target
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as copy:
            shutil.copyfileobj(content, copy)
