"""What the containers of one run share, from the check that Docker answers to the removal of the last of them."""

# pyright: reportMissingTypeStubs=false

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from secrets import token_hex
from typing import Any

from harbor import TrialEnvironmentConfig

from dockyard.config import EnvironmentConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.rollout.docker.engine import DockerError, ask
from dockyard.rollout.docker.janitor import remove_leftovers, remove_run
from dockyard.rollout.docker.network import Network, run_network
from dockyard.rollout.faults import DockerUnreachableError
from dockyard.rollout.site import LOOPBACK, Site

ENVIRONMENT = "dockyard.rollout.docker.environment:DockerEnvironment"
"""For Harbor's `environment.import_path`."""
_INSTALL = "install it (https://docs.docker.com/engine/install/); `dockyard doctor` checks this machine"

logger = logging.getLogger(__name__)


@asynccontextmanager
async def docker_site(config: EnvironmentConfig, *, inside: bool, run: str | None = None) -> AsyncGenerator[Site]:
    """Everything that the run's containers need; nothing of it is left when the block ends.

    `run` names a run that no other process can have open: what bears its name is of an earlier, killed one.
    """
    if inside and config.network == "none":
        message = "`environment.network` is `none`, but the agent calls the model from inside the environment"
        raise UsageError(message, hint="`--environment.network gateway` lets it reach the gateway and nothing else")
    await check_docker()
    if leftovers := await remove_leftovers():
        logger.info("removed what an earlier run left behind: %s", leftovers)
    if run and (leftovers := await remove_run(run)):
        logger.info("removed what this run left behind when it was killed: %s", leftovers)
    run = run or token_hex(4)
    async with run_network(config.network, run) as network:
        try:
            yield _site(config, run, network)
        finally:
            with suppress(DockerError, DockerUnreachableError):  # the next run's janitor removes it
                await remove_run(run)


async def check_docker() -> None:
    """Raise what a user can act on if Docker or its compose does not answer."""
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


def _site(config: EnvironmentConfig, run: str, network: Network | None) -> Site:
    ours: dict[str, Any] = {
        "run": run,
        "network": config.network,
        "network_name": network.name if network else None,
        "seal_level": "standard" if config.seal == "off" else config.seal,
    }
    environment = TrialEnvironmentConfig(
        import_path=ENVIRONMENT,
        kwargs=ours | config.kwargs,
        override_cpus=config.cpus,
        override_memory_mb=config.memory_mb,
        override_storage_mb=config.storage_mb,
    )
    listen = (LOOPBACK, *(network.listen if network else ()))
    return Site(environment=environment, listen=listen, host=network.host if network else None)
