"""The `docker` environment: derived from Harbor's, without its slow parts and with a seal.

Differences for a task: a command that times out returns code 124 instead of ending the trial, stdout and stderr are
separate, links are not downloaded, and the image built from a Dockerfile is kept for the next trial.

An overlay is added to the compose files of each trial. It comes before the task's own file, which overrides it.
"""

# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, override

from harbor.environments.base import ExecResult, OutputCallback, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.environments.definition import COMPOSE_FILE_NAME, should_use_prebuilt_docker_image
from harbor.environments.docker.docker import DockerEnvironment as HarborDocker
from harbor.environments.docker.docker import _sanitize_docker_compose_project_name
from harbor.models.task.config import NetworkMode, NetworkPolicy

from dockyard.config import Seal
from dockyard.rollout.docker import docker_cli, guard
from dockyard.rollout.docker.docker_cli import ask, docker, short
from dockyard.rollout.docker.images import DockerImage, images
from dockyard.rollout.docker.site import PROJECT_LABEL, Mode, label_args, owner_labels

PRIVATE = ("/tests", "/logs/verifier")
"""Mounted as separate volumes: a mount point cannot be replaced by a link or filled through the container's disk."""
SLEEP = ("sh", "-c", "exec sleep infinity")  # exec: killing a child `sleep` would end the container
_SERVICE_LABEL = "com.docker.compose.service"
_PATIENCE_S = 10.0  # a container that appears after its project was removed would remain
_THIS_PROCESS = token_hex(4)
_DONE = ExecResult(return_code=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """The additions to the compose files of one trial."""

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


class DockerEnvironment(HarborDocker):
    """For `environment.import_path`. One container per trial, or the containers of the task's compose file."""

    def __init__(
        self,
        *args: Any,
        session_id: str,
        environment_dir: Path,
        run: str = _THIS_PROCESS,
        network: Mode = "auto",
        network_name: str | None = None,
        max_processes: int = 4096,
        seal_level: Seal = "standard",
        **kwargs: Any,
    ) -> None:
        """`network_name` is the run's network, which tasks without a compose file share."""
        if network == "gateway" and network_name is None:
            raise ValueError("`network` is `gateway`, but there is no `network_name`")
        self._run = run
        self._network: Mode = network
        self._network_name = network_name
        self._max_processes = max_processes
        self._seal_level: Seal = seal_level
        self._is_composed = (environment_dir / COMPOSE_FILE_NAME).exists()
        self._image: DockerImage | None = None
        self._main: str | None = None
        self._overlay = tempfile.TemporaryDirectory(prefix="dockyard-docker-")
        if network != "auto":  # the run's setting replaces the task's
            kwargs |= {"network_policy": None, "phase_network_policies": ()}
        unique = f"{run}-{token_hex(4)}-{session_id}"  # trial names repeat across runs and retries
        super().__init__(*args, session_id=unique, environment_dir=environment_dir, **kwargs)  # pyright: ignore[reportUnknownMemberType]

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        ours: dict[str, bool] = {"disable_internet": True, "windows": False}
        if self._network != "auto":
            ours |= {"network_allowlist": True, "dynamic_network_policy": True}
        return super().capabilities.model_copy(update=ours)

    @override
    def validate_network_policy_support(self, network_policy: NetworkPolicy | None = None) -> None:
        if self._network == "auto":
            super().validate_network_policy_support(network_policy)

    @override
    async def set_network_policy(self, network_policy: NetworkPolicy) -> None:
        if self._network == "auto":
            await super().set_network_policy(network_policy)

    @override
    def _requires_egress_control(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *, startup_network_policy: NetworkPolicy, phase_network_policies: Sequence[NetworkPolicy]
    ) -> bool:
        """A task without any network does not need Harbor's sidecar, which restricts network access."""
        modes = {policy.network_mode for policy in (startup_network_policy, *phase_network_policies)}
        if modes == {NetworkMode.NO_NETWORK} and not self._is_composed:
            return False
        return modes != {NetworkMode.PUBLIC}

    @override
    def _validate_daemon_mode(self) -> None:
        """Checked once per run instead of by a blocking call in each trial."""

    @override
    async def _validate_image_os(self, image_name: str) -> None:
        """The engine itself refuses an image for another operating system."""

    @property
    @override
    def _docker_compose_paths(self) -> list[Path]:
        paths = super()._docker_compose_paths
        overlay = self._overlay_path
        if not overlay.exists():
            return paths
        base = self._DOCKER_COMPOSE_PREBUILT_PATH if self._use_prebuilt else self._DOCKER_COMPOSE_BUILD_PATH
        place = paths.index(base)
        return [*paths[:place], *([] if self._image else [base]), overlay, *paths[place + 1 :]]

    @override
    async def start(self, force_build: bool) -> None:
        if self._is_composed and self._network in ("none", "gateway"):
            raise SandboxBuildFailedError(
                f"`{self.environment_name}` has a {COMPOSE_FILE_NAME} with its own networks, which "
                f"`environment.network = {self._network}` cannot restrict. Use `auto`, or remove the task"
            )
        if not self._is_composed and not self.extra_docker_compose_paths:
            self._image = await self._find_image(force_build)
        self._overlay_path.write_text(json.dumps(self._make_overlay().compose()))
        await super().start(force_build)

    @override
    async def stop(self, delete: bool) -> None:
        try:
            await super().stop(delete)
        finally:
            self._overlay.cleanup()

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command. A command that times out is killed and returns code 124, as with `timeout`."""
        return await docker_cli.run(
            await self._container(),
            command,
            cwd=cwd or self.task_env_config.workdir,
            env=self._merge_env(env) or {},
            user=self._resolve_user(user),
            timeout_s=timeout_sec,
            on_output=self._output_callback(),
        )

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        try:
            await docker_cli.upload(str(source_path), await self._container(), target_path)
        except RuntimeError:  # its folder may not exist
            await self._platform.upload_file(source_path, target_path)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        try:
            await docker_cli.upload(f"{source_dir}/.", await self._container(), target_dir)
        except RuntimeError:
            await self._platform.upload_dir(source_dir, target_dir)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await docker_cli.download_file(await self._container(), source_path, Path(target_path))

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await docker_cli.download_folder(await self._container(), source_dir, Path(target_dir))

    async def seal(self) -> None:
        """Kill every process of the agent, empty /tests and /logs/verifier, restore the files that tests rely on."""
        container = await self._container()

        async def start() -> None:
            if self._image and not self._image.has_healthcheck:
                await ask("start", container)
            else:
                only_main = ["--no-recreate", "--no-build", "--no-deps", "main"]
                await self._run_docker_compose_command(["up", "--detach", "--wait", *only_main])

        labels = label_args(owner_labels(self._run))
        restored = await guard.seal(container, labels, start=start, private=self._private, level=self._seal_level)
        if restored:
            self.logger.warning("restored from the image before grading: %s", ", ".join(restored))

    @property
    def _overlay_path(self) -> Path:
        return Path(self._overlay.name) / "docker-compose-dockyard.json"

    @property
    def _private(self) -> tuple[str, ...]:
        mounted = {mount["target"].rstrip("/") for mount in self._host_mounts}
        return tuple(target for target in PRIVATE if target not in mounted)

    async def _find_image(self, force_build: bool) -> DockerImage:
        name = self.task_env_config.docker_image
        if name and should_use_prebuilt_docker_image(self.environment_dir, docker_image=name, force_build=force_build):
            return await images().present(name)
        folder, content = self.environment_dir, self.environment_id
        return await images().built(folder, content, task=self.environment_name, force=force_build)

    def _make_overlay(self) -> Overlay:
        return Overlay(
            labels=owner_labels(self._run),
            image=self._image.name if self._image else None,
            network=self._choose_network(),
            max_processes=self._max_processes,
            resolves=self._network != "gateway",
            private=self._private,
        )

    def _choose_network(self) -> str | None:
        if self._enable_egress_control:
            return None
        if self._network == "none" or self._network_disabled:
            return "none"
        return self._network_name or "bridge"

    async def _container(self) -> str:
        """Return the id of the main container, which must exist."""
        if self._main is None:
            self._main = next(iter(await _containers(self.session_id, "main")), None)
        if self._main is None:
            raise RuntimeError(f"`{self.environment_name}` has no container")
        return self._main

    @override
    async def _run_docker_compose_command(
        self,
        command: list[str],
        check: bool = True,
        timeout_sec: int | None = None,
        stdin_data: bytes | None = None,
        on_output: OutputCallback | None = None,
    ) -> ExecResult:
        """Run the compose command that Harbor requests, unless it is unnecessary here."""
        match command:
            case ["build"] if self._image:
                return _DONE
            case ["down", "--remove-orphans"]:  # before the start: the project is new
                return _DONE
            case ["up", "--detach", "--wait"] if self._image and not self._image.has_healthcheck:
                command = ["up", "--detach"]
            case ["down", "--rmi", *_] if self._image and not self._enable_egress_control:
                await _remove(self.session_id)
                return _DONE
            case ["down", *rest]:
                command = ["down", "--timeout", "0", *rest]
            case _:
                pass
        return await _compose(
            self.session_id,
            *command,
            folder=self.environment_dir.resolve(),
            files=[path.resolve() for path in self._docker_compose_paths],
            env=self._compose_env_vars(include_os_env=True),
            check=check,
            stdin=stdin_data,
            timeout_s=timeout_sec,
        )


async def _compose(
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


async def _containers(session: str, service: str | None = None) -> list[str]:
    """Return the ids of the containers, including stopped ones."""
    filters = ["--filter", f"label={PROJECT_LABEL}={_project(session)}"]
    filters += ["--filter", f"label={_SERVICE_LABEL}={service}"] if service else []
    return (await ask("ps", "--all", "--quiet", "--no-trunc", *filters)).split()


async def _remove(session: str) -> None:
    """Remove a project that consists of containers only. This is faster than compose."""
    if found := await _containers(session):
        await ask("rm", "--force", "--volumes", *found)


def _project(session: str) -> str:
    return _sanitize_docker_compose_project_name(session)
