"""Run the `docker` command. A cancelled or timed-out call leaves no process behind on this machine."""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from dockyard.process import Output, Sink
from dockyard.rollout.blame import DockerUnreachableError

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


class DockerError(Exception):
    """The engine refused a command."""


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def is_unreachable(self) -> bool:
        """Use only for commands of the client itself: a program in a container may print anything."""
        return self.code != 0 and any(sign in self.stderr.lower() for sign in _UNREACHABLE)


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
    if done.is_unreachable:
        raise DockerUnreachableError(short(done.stderr))
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
