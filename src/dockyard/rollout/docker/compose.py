"""The compose project of one trial: labels, the overlay added to a task's compose files, and the run's network.

Labels name the owner of a container or network, so that a later run can find orphaned ones. The overlay comes before
the task's own file, so the task's file overrides it. Containers of a run share one network, on which they reach the
internet and this machine, but not each other. An engine supports about thirty networks, and creating one takes longer
than creating a container.
"""

# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

import os
import socket
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

from harbor.environments.base import ExecResult, SandboxBuildFailedError
from harbor.environments.docker.docker import _sanitize_docker_compose_project_name

from dockyard.errors import DockyardError
from dockyard.rollout.blame import DockerUnreachableError
from dockyard.rollout.docker.docker_cli import DockerError, ask, docker, short

OWNER_LABEL = "dockyard.owner"
RUN_LABEL = "dockyard.run"
PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"
PRIVATE = ("/tests", "/logs/verifier")
"""Mounted as separate volumes: a mount point cannot be replaced by a link or filled through the container's disk."""
SLEEP = ("sh", "-c", "exec sleep infinity")  # exec: killing a child `sleep` would end the container
_UNKNOWN = "-"  # where there is no /proc
_SEPARATOR = "|"
_PATIENCE_S = 10.0  # a container that appears after its project was removed would remain

type Mode = Literal["auto", "none", "gateway", "public"]


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, identified uniquely even if its pid is reused."""

    host: str
    boot: str
    namespace: str
    """The pid namespace, within which a pid is unique."""
    pid: str
    started: str

    @classmethod
    def current(cls) -> "Owner":
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "Owner":
        return cls(socket.gethostname(), _boot(), _namespace(), str(pid), _start_time(pid))

    @classmethod
    def parse(cls, label: str) -> "Owner | None":
        """Parse a label. Return None for labels that Dockyard did not write."""
        parts = label.split(_SEPARATOR)
        return cls(*parts) if len(parts) == 5 and parts[3].isdigit() else None

    @property
    def label(self) -> str:
        return _SEPARATOR.join(astuple(self))

    def is_gone(self) -> bool:
        """Whether the process has certainly ended. False for owners on other hosts, which cannot be checked."""
        if self.host != socket.gethostname():
            return False
        if self.boot != _boot():
            return True
        if self.namespace != _namespace():
            return False
        if self.started == _UNKNOWN:
            return not _is_alive(int(self.pid))
        return _start_time(int(self.pid)) != self.started


def owner_labels(run: str) -> dict[str, str]:
    """Return the labels for everything that a run creates."""
    return {OWNER_LABEL: Owner.current().label, RUN_LABEL: run}


def label_args(labels: dict[str, str]) -> list[str]:
    return [arg for name, value in labels.items() for arg in ("--label", f"{name}={value}")]


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def _namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return _UNKNOWN


def _start_time(pid: int) -> str:
    stat = _read(f"/proc/{pid}/stat")
    fields = stat.rpartition(")")[2].split()  # the process name before it may contain anything
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else _UNKNOWN


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return _UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """The additions of one trial."""

    labels: dict[str, str]
    image: str | None
    """None: the task's compose file names it."""
    network: str | None
    """The run's network, `none`, or the engine's `bridge`. None: the task and Harbor decide."""
    max_processes: int
    resolves: bool = True
    """Whether host names can be resolved. If not, a short timeout avoids ten seconds per failed lookup."""
    private: tuple[str, ...] = PRIVATE

    def compose(self) -> dict[str, Any]:
        main: dict[str, Any] = {
            "labels": self.labels,
            "stop_grace_period": "0s",  # PID 1 is a shell, which ignores SIGTERM
            "volumes": [{"type": "volume", "target": target} for target in self.private],
        }
        if self.image is None:
            return {"services": {"main": main}}
        main |= {
            "image": self.image,
            "command": list(SLEEP),
            "pull_policy": "never",
            "pids_limit": self.max_processes,
        }
        if not self.resolves:
            main["dns_opt"] = ["timeout:1", "attempts:1"]
        compose: dict[str, Any] = {"services": {"main": main}}
        if self.network in ("none", "bridge"):
            main["network_mode"] = self.network
        elif self.network:
            compose["networks"] = {"default": {"name": self.network, "external": True}}
        return compose


@dataclass(frozen=True, slots=True)
class DockerNetwork:
    """A network and this machine's address on it."""

    name: str
    host: str | None
    """None if the engine is on another machine."""
    listen: tuple[str, ...]


@asynccontextmanager
async def run_network(mode: Mode, run: str) -> AsyncGenerator[DockerNetwork | None]:
    """Create the network of one run and remove it at the end. None if its containers have no network."""
    if mode == "none":
        yield None
        return
    name = f"dockyard-{run}"
    isolated = ["--internal"] if mode == "gateway" else []
    no_talk = ["--opt", "com.docker.network.bridge.enable_icc=false"]
    try:
        await ask("network", "create", *isolated, *no_talk, *label_args(owner_labels(run)), name)
    except DockerError as error:
        raise DockyardError(
            f"Docker cannot create a network for the run: {error}", hint="`docker network prune` removes unused ones"
        ) from error
    try:
        yield await _describe(name, mode)
    finally:
        with suppress(DockerError, DockerUnreachableError):  # the next run removes it
            await ask("network", "rm", name)


async def _describe(name: str, mode: Mode) -> DockerNetwork:
    gateways = await ask("network", "inspect", "--format", "{{range .IPAM.Config}}{{.Gateway}} {{end}}", name)
    address = next((item.split("/")[0] for item in gateways.split() if ":" not in item), "")
    if address and _is_ours(address):
        return DockerNetwork(name, address, (address,))
    if mode == "gateway":
        raise DockyardError(
            "`environment.network` is `gateway`, but containers of this Docker engine reach this machine only "
            "through a network that reaches everything",
            hint="`--environment.network public`, or an engine that runs on this Linux machine itself",
        )
    system = await ask("info", "--format", "{{.OperatingSystem}}")
    return DockerNetwork(name, "host.docker.internal" if "Docker Desktop" in system else None, ())


def _is_ours(address: str) -> bool:
    """Whether this machine has the address. It does if the engine runs on it."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


async def compose(
    session: str,
    *command: str,
    folder: Path,
    files: Iterable[Path],
    env: Mapping[str, str],
    check: bool,
    stdin: bytes | None = None,
    timeout_s: float | None = None,
) -> ExecResult:
    """Run `docker compose COMMAND`. With `check`, raise a short error that says whether the engine answered."""
    done = await docker(
        *("compose", "--project-name", _project(session), "--project-directory", str(folder)),
        *(arg for path in files for arg in ("--file", str(path))),
        *command,
        env=env,
        stdin=stdin,
        timeout_s=timeout_s,
        patience_s=_PATIENCE_S if command[0] == "up" else 0.0,
    )
    if check and done.code != 0:
        done.require_engine()
        message = f"`docker compose {command[0]}` in `{folder}`: {short(done.stderr, 5)}"
        raise SandboxBuildFailedError(message) if command[0] in ("build", "up") else RuntimeError(message)
    return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.code)


async def containers(session: str, service: str | None = None) -> list[str]:
    """Return the ids of the containers, including stopped ones."""
    filters = ["--filter", f"label={PROJECT_LABEL}={_project(session)}"]
    filters += ["--filter", f"label={SERVICE_LABEL}={service}"] if service else []
    return (await ask("ps", "--all", "--quiet", "--no-trunc", *filters)).split()


async def remove(session: str) -> None:
    """Remove a project that consists of containers only. This is faster than compose."""
    if found := await containers(session):
        await ask("rm", "--force", "--volumes", *found)


def _project(session: str) -> str:
    return _sanitize_docker_compose_project_name(session)
