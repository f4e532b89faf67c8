"""Choose the mechanism for sandboxes on this machine by starting one, and say what to change if none works."""

import asyncio
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from dockyard.errors import DockyardError
from dockyard.process import Output
from dockyard.rollout.sandbox.client import LANDLOCK, NAMESPACES, Command, Sandbox, SandboxStartError
from dockyard.rollout.sandbox.landlock import ABI_OF_SCOPES
from dockyard.rollout.sandbox.launch import ABI_VARIABLE, SandboxLimits, landlock_abi, outside_user

type SandboxSetting = Literal["auto", "namespaces", "landlock"]

OTHER_WAY = 'or set `environment.type = "docker"`'
SETTINGS = (
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
)
"""Kernel setting, the value of it that forbids user namespaces, and the fix."""
CONTAINER_FLAGS = " ".join(f"--security-opt {flag}=unconfined" for flag in ("seccomp", "apparmor", "systempaths"))
_PROBE = SandboxLimits(storage_bytes=1 << 20, memory_bytes=1 << 30, max_processes=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxProblem:
    """Why no sandbox can start here, and the command that changes it."""

    message: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """A mechanism that works on this machine."""

    name: str
    own_user: bool = True
    """Whether each sandbox runs as a user of its own."""
    abi: int = 0
    """The version of Landlock; 0 if it is not used."""

    @property
    def has_terminals(self) -> bool:
        return self.name == NAMESPACES or self.own_user

    @property
    def not_held(self) -> tuple[str, ...]:
        """The guarantees of a sandbox with namespaces that this one does not give, as sentences."""
        return () if self.name == NAMESPACES else tuple(text for holds, text in _lacks(self) if not holds)

    def describe(self) -> str:
        """Return one line for users."""
        if self.name == NAMESPACES:
            return "bubblewrap, with namespaces of its own"
        user = "a user of its own" if self.own_user else "your user"
        return f"Landlock ABI {self.abi}, {user}: files and processes apart, kernel shared"


def _lacks(mechanism: Mechanism) -> tuple[tuple[bool, str], ...]:
    """Return pairs: whether the mechanism gives the guarantee, and what is missing if it does not."""
    return (
        (False, "a task has no loopback network: it cannot start a server and connect to it"),
        (False, "a task sees the list of this machine's processes, with their command lines"),
        (False, "a task is not user 0, though its user is called root; debuggers do not work"),
        (False, "files are on disk, not in memory; a task whose files take twice its storage is ended"),
        (False, "a task has no System V memory, no POSIX message queues and no memory files"),
        (False, "a task can find out which files this machine has, but not their contents"),
        (mechanism.own_user, "a task has no terminals, which tmux and so `terminus-2` need, and no named sockets"),
        (not mechanism.own_user, "a task can connect to named sockets that every user of this machine may write to"),
        (mechanism.abi >= ABI_OF_SCOPES, "a task can end or stop its own sandbox, and then gets no reward"),
        (mechanism.abi >= ABI_OF_SCOPES, "a task can connect to abstract sockets of this machine"),
        (mechanism.abi >= 3, "a task may empty files that every user of this machine may write"),
        (mechanism.abi >= 2, "a file cannot be renamed into another folder, only copied"),
    )


def choose_mechanism(wanted: SandboxSetting = "auto") -> Mechanism:
    """Return a mechanism that was tried out, or raise DockyardError. The first call blocks for about 50 ms."""
    found = _try_all(wanted, os.environ.get(ABI_VARIABLE))
    if isinstance(found, SandboxProblem):
        raise DockyardError(found.message, hint=found.hint)
    return found


def check_sandbox(wanted: SandboxSetting = "auto") -> SandboxProblem | None:
    """Return None if a sandbox starts here, otherwise the reason."""
    found = _try_all(wanted, os.environ.get(ABI_VARIABLE))
    return found if isinstance(found, SandboxProblem) else None


@cache
def _try_all(wanted: SandboxSetting, masked_abi: str | None) -> Mechanism | SandboxProblem:
    if wanted == "namespaces":
        return _try_namespaces()
    if wanted == "landlock":
        return _try_landlock()
    first = _try_namespaces()
    if isinstance(first, Mechanism):
        return first
    second = _try_landlock()
    if isinstance(second, Mechanism):
        return second
    return SandboxProblem(
        message=f"{first.message}; without namespaces: {second.message}",
        hint=f"{second.hint}; for namespaces: {first.hint}",
    )


def _try_namespaces() -> Mechanism | SandboxProblem:
    return _problem_with(NAMESPACES) or Mechanism(name=NAMESPACES)


def _try_landlock() -> Mechanism | SandboxProblem:
    abi, own_user = landlock_abi(), outside_user() is not None
    lacking = landlock_lacks(abi, own_user=own_user, machine=platform.machine())
    return lacking or _problem_with(LANDLOCK) or Mechanism(name=LANDLOCK, own_user=own_user, abi=abi)


def _problem_with(mechanism: str) -> SandboxProblem | None:
    with ThreadPoolExecutor(1) as thread:  # so that it also works under a running event loop
        return thread.submit(asyncio.run, _try(mechanism)).result()


def landlock_lacks(abi: int, *, own_user: bool, machine: str) -> SandboxProblem | None:
    """Return why sandboxes without namespaces are unsafe here: a rollout could change another, or its own reward."""
    if machine != "x86_64":
        return SandboxProblem(message=f"sandboxes without namespaces need x86-64, this is {machine}", hint=OTHER_WAY)
    if abi == 0:
        return SandboxProblem(
            message="this kernel has no Landlock, so the files of sandboxes could not be isolated",
            hint="use a kernel of 5.13 or newer with `landlock` in its `lsm=` option, " + OTHER_WAY,
        )
    if abi < ABI_OF_SCOPES and not own_user:
        return SandboxProblem(
            message=f"Landlock ABI {abi} cannot isolate signals, and you are not root: rollouts could kill each other",
            hint="run as root, so that each rollout has its own user, or use a kernel of 6.12 or newer",
        )
    return None


async def _try(mechanism: str) -> SandboxProblem | None:
    try:
        sandbox = await Sandbox.start(mechanism, _PROBE, network=False)
    except SandboxStartError as error:
        return diagnose(str(error))
    except DockyardError as error:
        return SandboxProblem(message=error.message, hint=error.hint)
    except OSError as error:
        return SandboxProblem(message=f"no sandbox can start here: {error}", hint=OTHER_WAY.removeprefix("or "))
    try:
        errors = Output()
        command = Command(argv=("/bin/bash", "-c", ":"), cwd="/", env={"PATH": "/usr/bin:/bin"})
        if await sandbox.run(command, stdout=Output(), stderr=errors) != 0:
            message = f"a sandbox needs bash under /usr: {errors.text().strip()}"
            return SandboxProblem(message=message, hint=f"`apt-get install bash`, {OTHER_WAY}")
    finally:
        await sandbox.stop()
    return None


def diagnose(stderr: str, root: Path = Path("/")) -> SandboxProblem:
    """Return the most likely reason for bubblewrap's error message."""
    message = f"no sandbox can start here: {stderr.strip().splitlines()[-1] if stderr.strip() else 'bwrap failed'}"
    for setting, forbidding, fix in SETTINGS:
        path = root / "proc/sys" / setting
        if path.is_file() and path.read_text().strip() == forbidding:
            return SandboxProblem(message=message, hint=f"`sudo sysctl -w {fix}`, {OTHER_WAY}")
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        hint = f"start this container with `--privileged`, or with `{CONTAINER_FLAGS}`"
        return SandboxProblem(message=message, hint=hint)
    return SandboxProblem(message=message, hint=OTHER_WAY.removeprefix("or "))
