"""Queries of this machine for the checks.

Each is answered within 5 seconds, the trial of a sandbox within 30. No secret is read.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dockyard.cache import cache_dir

_SANDBOX_PATIENCE = 6.0  # a sandbox may take 6 times as long as other queries
# Run in a separate process, which can be killed if bubblewrap hangs.
_TRY_SANDBOX = (
    "import json\nfrom dockyard.errors import DockyardError\n"
    "from dockyard.rollout.sandbox.check import choose_mechanism\n"
    "try:\n    found = choose_mechanism(); print(json.dumps([found.describe(), *found.not_held]))\n"
    "except DockyardError as error:\n    print(json.dumps({'message': error.message, 'hint': error.hint}))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The result of a command."""

    code: int | None
    """Its exit code; None if it took too long and was killed."""
    output: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Free space and permissions of a folder, which need not exist yet."""

    free_bytes: int
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProblem:
    """Why something does not work, and what to do about it."""

    message: str
    hint: str


class Probe(Protocol):
    """The interface through which checks query a machine."""

    @property
    def python(self) -> str:
        """Path of this Python."""
        ...

    @property
    def python_version(self) -> tuple[int, int, int]: ...

    @property
    def system(self) -> str:
        """`Linux`, `Darwin` or `Windows`."""
        ...

    @property
    def cache_dir(self) -> Path: ...

    def has_command(self, name: str) -> bool: ...

    def run(self, command: Sequence[str]) -> Ran:
        """Run a command that exists, for at most 5 seconds."""
        ...

    def package_version(self, name: str) -> str | None: ...

    def has_variable(self, name: str) -> bool:
        """Whether an environment variable is set and not empty. Its value is not returned."""
        ...

    def space(self, folder: Path) -> Space: ...

    def sandbox(self) -> MachineProblem | list[str]:
        """Return how sandboxes are made here, followed by what they do not protect; or why none can start."""
        ...


class Machine:
    """This machine."""

    python = sys.executable
    python_version = sys.version_info[:3]
    system = platform.system()

    def __init__(self, *, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s

    @property
    def cache_dir(self) -> Path:
        return cache_dir()

    def has_command(self, name: str) -> bool:
        return shutil.which(name) is not None

    def run(self, command: Sequence[str], *, patience: float = 1.0) -> Ran:
        """`patience` is a factor of the time that a question may take."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        with process:
            try:
                output, error = process.communicate(timeout=patience * self._timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # including its children, which would keep the pipes open
                return Ran(code=None)
        return Ran(code=process.returncode, output=output.strip(), error=error.strip())

    def package_version(self, name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def has_variable(self, name: str) -> bool:
        return bool(os.environ.get(name))

    def space(self, folder: Path) -> Space:
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        return Space(free_bytes=shutil.disk_usage(existing).free, writable=os.access(existing, os.W_OK))

    def sandbox(self) -> MachineProblem | list[str]:
        ran = self.run([self.python, "-c", _TRY_SANDBOX], patience=_SANDBOX_PATIENCE)
        if ran.code is None:
            return MachineProblem(message="a sandbox takes too long to start", hint="dockyard doctor")
        if ran.code != 0:
            reason = ran.error.splitlines()[-1] if ran.error else f"exit code {ran.code}"
            return MachineProblem(
                message=f"trying a sandbox failed: {reason}", hint=f"{self.python} -c '{_TRY_SANDBOX}'"
            )
        found: dict[str, str] | list[str] = json.loads(ran.output)
        return MachineProblem(message=found["message"], hint=found["hint"]) if isinstance(found, dict) else found
