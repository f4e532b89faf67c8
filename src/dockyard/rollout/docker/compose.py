"""One trial's compose project."""

# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from collections.abc import Iterable, Mapping
from pathlib import Path

from harbor.environments.base import ExecResult, SandboxBuildFailedError
from harbor.environments.docker.docker import _sanitize_docker_compose_project_name

from dockyard.rollout.docker.engine import ask, docker, short
from dockyard.rollout.docker.owner import PROJECT_LABEL, SERVICE_LABEL
from dockyard.rollout.faults import DockerUnreachableError

_PATIENCE_S = 10.0  # a container that comes up after its project was removed would stay


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
    """Run `docker compose COMMAND`. With `check`, errors are short and say whether the engine answered at all."""
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
        if done.is_unreachable:
            raise DockerUnreachableError(short(done.stderr))
        message = f"`docker compose {command[0]}` in `{folder}`: {short(done.stderr, 5)}"
        raise SandboxBuildFailedError(message) if command[0] in ("build", "up") else RuntimeError(message)
    return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.code)


async def containers(session: str, service: str | None = None) -> list[str]:
    """Ids, also of those that ended."""
    filters = ["--filter", f"label={PROJECT_LABEL}={_project(session)}"]
    filters += ["--filter", f"label={SERVICE_LABEL}={service}"] if service else []
    return (await ask("ps", "--all", "--quiet", "--no-trunc", *filters)).split()


async def remove(session: str) -> None:
    """Without compose, which takes longer: for a project that has nothing but containers."""
    if found := await containers(session):
        await ask("rm", "--force", "--volumes", *found)


def _project(session: str) -> str:
    return _sanitize_docker_compose_project_name(session)
