"""Removes what a killed run left behind: by our labels only, and only where the owner is certainly gone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dockyard.rollout.docker.engine import DockerError, ask
from dockyard.rollout.docker.owner import OWNER_LABEL, PROJECT_LABEL, RUN_LABEL, Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What was removed."""

    containers: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = {"container": self.containers, "network": self.networks, "volume": self.volumes}
        return ", ".join(f"{len(ids)} {name}{'s' * (len(ids) != 1)}" for name, ids in counts.items() if ids)

    def __bool__(self) -> bool:
        return bool(self.containers or self.networks or self.volumes)


async def remove_leftovers() -> Leftovers:
    """Of owners on this host whose process has ended."""
    return await _remove(OWNER_LABEL, _is_of_the_gone)


async def remove_run(run: str) -> Leftovers:
    """Whatever a run still has when it ends."""
    return await _remove(RUN_LABEL, lambda label: label == run)


def _is_of_the_gone(label: str) -> bool:
    owner = Owner.parse(label)
    return owner is not None and owner.is_gone()


async def _remove(label: str, is_meant: Callable[[str], bool]) -> Leftovers:
    ours = await _list("ps", label, "--all", "--no-trunc")
    meant = {item: project for item, (value, project) in ours.items() if is_meant(value)}
    networks = {item for item, (value, _) in (await _list("network ls", label)).items() if is_meant(value)}
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
    """Id -> the label's value, and the compose project."""
    line = f'{{{{.ID}}}}\t{{{{.Label "{label}"}}}}\t{{{{.Label "{PROJECT_LABEL}"}}}}'
    text = await ask(*command.split(), *args, "--filter", f"label={label}", "--format", line)
    rows = [row.split("\t") for row in text.splitlines()]
    return {row[0]: (row[1], row[2] if len(row) > 2 else "") for row in rows}


async def _drop(items: Iterable[str], *command: str) -> tuple[str, ...]:
    dropped: list[str] = []
    for item in sorted(items):
        try:
            await ask(*command, item)
        except DockerError:  # someone else removed it, or holds it
            continue
        dropped.append(item)
    return tuple(dropped)
