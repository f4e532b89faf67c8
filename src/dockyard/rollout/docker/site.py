"""What the containers of one run share, from the first check of Docker to the removal of the last container.

Labels name the owner of a container or network, so that a later run can find and remove the leftovers of a killed one:
only objects with Dockyard's labels, and only if their owner has ended. Containers of a run share one network, on which
they reach the internet and this machine, but not each other. An engine supports about thirty networks, and creating one
takes longer than creating a container.
"""

import logging
import os
import socket
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from secrets import token_hex
from typing import Literal

from dockyard.config import EnvironmentConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.rollout.blame import DockerUnreachableError
from dockyard.rollout.docker.docker_cli import DockerError, ask
from dockyard.rollout.environments import LOOPBACK, Site, harbor_config

ENVIRONMENT = "dockyard.rollout.docker.environment:DockerEnvironment"
"""For Harbor's `environment.import_path`."""
OWNER_LABEL = "dockyard.owner"
RUN_LABEL = "dockyard.run"
PROJECT_LABEL = "com.docker.compose.project"
_INSTALL = "install it (https://docs.docker.com/engine/install/); `dockyard doctor` checks this machine"
_UNKNOWN = "-"  # where there is no /proc
_SEPARATOR = "|"

type Mode = Literal["auto", "none", "gateway", "public"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DockerNetwork:
    """A network and this machine's address on it."""

    name: str
    host: str | None
    """None if the engine is on another machine."""
    listen: tuple[str, ...]


@asynccontextmanager
async def docker_site(config: EnvironmentConfig, *, inside: bool, run: str | None = None) -> AsyncGenerator[Site]:
    """Provide everything that the run's containers need, and remove all of it when the block ends.

    `run` names a run that no other process has open, so objects with its name belong to an earlier, killed process.
    """
    if inside and config.network == "none":
        message = "`environment.network` is `none`, but the agent calls the model from inside the environment"
        raise UsageError(message, hint="`--environment.network gateway` lets it reach the gateway and nothing else")
    await check_docker()
    if leftovers := await remove_leftovers():
        logger.info("removed leftovers of an earlier run: %s", leftovers)
    if run and (leftovers := await remove_run(run)):
        logger.info("removed leftovers of this run from before it was killed: %s", leftovers)
    run = run or token_hex(4)
    async with run_network(config.network, run) as network:
        try:
            yield _site(config, run, network)
        finally:
            with suppress(DockerError, DockerUnreachableError):  # the next run removes it
                await remove_run(run)


async def check_docker() -> None:
    """Raise an error with a hint if Docker or `docker compose` does not answer."""
    try:
        await ask("version", "--format", "{{.Server.Version}}")
    except (DockerUnreachableError, DockerError) as error:
        raise DockyardError(f"Docker does not answer: {error}", hint=f"start Docker, or {_INSTALL}") from error
    try:
        version = await ask("compose", "version", "--short")
    except DockerError:
        version = ""
    if not version.lstrip("v").partition(".")[0].isdigit() or version.startswith(("1.", "v1.")):
        raise DockyardError("`docker compose` is not version 2, which Harbor needs", hint=_INSTALL)


def _site(config: EnvironmentConfig, run: str, network: DockerNetwork | None) -> Site:
    ours: dict[str, object] = {
        "run": run,
        "network": config.network,
        "network_name": network.name if network else None,
        "seal_level": "standard" if config.seal == "off" else config.seal,
    }
    environment = harbor_config(config, import_path=ENVIRONMENT, kwargs=ours)
    listen = (LOOPBACK, *(network.listen if network else ()))
    return Site(environment=environment, listen=listen, host=network.host if network else None)


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
class Leftovers:
    """Containers, networks and volumes that were removed."""

    containers: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = {"container": self.containers, "network": self.networks, "volume": self.volumes}
        return ", ".join(f"{len(ids)} {name}{'s' * (len(ids) != 1)}" for name, ids in counts.items() if ids)

    def __bool__(self) -> bool:
        return bool(self.containers or self.networks or self.volumes)


async def remove_leftovers() -> Leftovers:
    """Remove the leftovers of processes of this host that have ended."""
    return await _remove(OWNER_LABEL, _owner_has_ended)


async def remove_run(run: str) -> Leftovers:
    """Remove everything that a run still has."""
    return await _remove(RUN_LABEL, lambda label: label == run)


def _owner_has_ended(label: str) -> bool:
    owner = Owner.parse(label)
    return owner is not None and owner.is_gone()


async def _remove(label: str, matches: Callable[[str], bool]) -> Leftovers:
    ours = await _list("ps", label, "--all", "--no-trunc")
    meant = {item: project for item, (value, project) in ours.items() if matches(value)}
    networks = {item for item, (value, _) in (await _list("network ls", label)).items() if matches(value)}
    containers, volumes = set(meant), set[str]()
    for project in {project for project in meant.values() if project}:
        mine = ["--quiet", "--filter", f"label={PROJECT_LABEL}={project}"]
        containers |= set((await ask("ps", "--all", "--no-trunc", *mine)).split())
        networks |= set((await ask("network", "ls", *mine)).split())
        volumes |= set((await ask("volume", "ls", *mine)).split())
    return Leftovers(
        containers=await _drop(containers, "rm", "--force", "--volumes"),
        networks=await _drop(networks, "network", "rm"),
        volumes=await _drop(volumes, "volume", "rm"),
    )


async def _list(command: str, label: str, *args: str) -> dict[str, tuple[str, str]]:
    """Return id -> the label's value and the compose project."""
    line = f'{{{{.ID}}}}\t{{{{.Label "{label}"}}}}\t{{{{.Label "{PROJECT_LABEL}"}}}}'
    text = await ask(*command.split(), *args, "--filter", f"label={label}", "--format", line)
    rows = [row.split("\t") for row in text.splitlines()]
    return {row[0]: (row[1], row[2] if len(row) > 2 else "") for row in rows}


async def _drop(items: Iterable[str], *command: str) -> tuple[str, ...]:
    dropped: list[str] = []
    for item in sorted(items):
        try:
            await ask(*command, item)
        except DockerError:  # it was removed meanwhile, or is in use
            continue
        dropped.append(item)
    return tuple(dropped)
