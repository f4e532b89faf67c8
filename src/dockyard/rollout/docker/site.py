"""What the containers of one run share, from the first check of Docker to the removal of the last container.

Leftovers of killed runs are removed as well: only objects with Dockyard's labels, and only if their owner has ended.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from secrets import token_hex

from dockyard.config import EnvironmentConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.rollout.blame import DockerUnreachableError
from dockyard.rollout.docker.compose import OWNER_LABEL, PROJECT_LABEL, RUN_LABEL, DockerNetwork, Owner, run_network
from dockyard.rollout.docker.docker_cli import DockerError, ask
from dockyard.rollout.environments import LOOPBACK, Site, harbor_config

ENVIRONMENT = "dockyard.rollout.docker.environment:DockerEnvironment"
"""For Harbor's `environment.import_path`."""
_INSTALL = "install it (https://docs.docker.com/engine/install/); `dockyard doctor` checks this machine"

logger = logging.getLogger(__name__)


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
