"""The network that a run's containers share. They cannot talk to each other on it, only out, or to this machine.

One per run: an engine has room for about thirty, and making one takes longer than starting a container.
"""

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from dockyard.errors import DockyardError
from dockyard.rollout.docker.engine import DockerError, ask
from dockyard.rollout.docker.owner import label_args, owner_labels
from dockyard.rollout.faults import DockerUnreachableError

type Mode = Literal["auto", "none", "gateway", "public"]


@dataclass(frozen=True, slots=True)
class Network:
    """A network and this machine's address on it."""

    name: str
    host: str | None
    """None where the engine is on another machine."""
    listen: tuple[str, ...]


@asynccontextmanager
async def run_network(mode: Mode, run: str) -> AsyncGenerator[Network | None]:
    """Made for one run. None when its containers have no network at all."""
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
            f"Docker cannot make a network for the run: {error}", hint="`docker network prune` removes unused ones"
        ) from error
    try:
        yield await _describe(name, mode)
    finally:
        with suppress(DockerError, DockerUnreachableError):  # the next run's janitor removes it
            await ask("network", "rm", name)


async def _describe(name: str, mode: Mode) -> Network:
    gateways = await ask("network", "inspect", "--format", "{{range .IPAM.Config}}{{.Gateway}} {{end}}", name)
    address = next((item.split("/")[0] for item in gateways.split() if ":" not in item), "")
    if address and _is_ours(address):
        return Network(name, address, (address,))
    if mode == "gateway":
        raise DockyardError(
            "`environment.network` is `gateway`, but containers of this Docker engine reach this machine only "
            "through a network that reaches everything",
            hint="`--environment.network public`, or an engine that runs on this Linux machine itself",
        )
    system = await ask("info", "--format", "{{.OperatingSystem}}")
    return Network(name, "host.docker.internal" if "Docker Desktop" in system else None, ())


def _is_ours(address: str) -> bool:
    """Whether this machine has the address, as it does when the engine runs on it."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
