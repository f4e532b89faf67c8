"""Can a sandbox start on this machine? Starts one to find out, and says what to change if not."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dockyard.errors import DockyardError
from dockyard.rollout.output import Output
from dockyard.rollout.sandbox.client import Command, Sandbox, SandboxStartError

OTHER_WAY = 'or set `environment.type = "docker"`'
SETTINGS = (
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
)
"""(kernel setting, the value that forbids user namespaces, what to set instead)"""
CONTAINER_FLAGS = " ".join(f"--security-opt {flag}=unconfined" for flag in ("seccomp", "apparmor", "systempaths"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxProblem:
    """Why no sandbox can start here, and the command that changes it."""

    message: str
    hint: str


def check_sandbox() -> SandboxProblem | None:
    """None when a sandbox starts here. Blocks for some 50 ms."""
    with ThreadPoolExecutor(1) as thread:  # so that it also works under a running event loop
        return thread.submit(asyncio.run, _try()).result()


async def _try() -> SandboxProblem | None:
    try:
        sandbox = await Sandbox.start(storage_bytes=1 << 20, network=False)
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
    """The likeliest reason behind what bubblewrap said."""
    message = f"no sandbox can start here: {stderr.strip().splitlines()[-1] if stderr.strip() else 'bwrap failed'}"
    for setting, forbidding, fix in SETTINGS:
        path = root / "proc/sys" / setting
        if path.is_file() and path.read_text().strip() == forbidding:
            return SandboxProblem(message=message, hint=f"`sudo sysctl -w {fix}`, {OTHER_WAY}")
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        hint = f"start this container with `--privileged`, or with `{CONTAINER_FLAGS}`"
        return SandboxProblem(message=message, hint=hint)
    return SandboxProblem(message=message, hint=OTHER_WAY.removeprefix("or "))
