"""Harbor's interface to the `sandbox` environment.

A task's images (`docker_image`, FROM) are not used: its tools are those of the host's /usr, and it runs as root without
privileges. It has no network unless `network` is set. `storage_mb` limits each of /, /logs, /logs/verifier and /tests,
which are in memory; `memory_mb` limits the private memory of each process; `cpus` is not enforced.
"""

# pyright: reportMissingTypeStubs=false

import asyncio
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, override

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import COMPOSE_FILE_NAME, DOCKERFILE_NAME

from dockyard.errors import DockyardError
from dockyard.process import Output
from dockyard.rollout.sandbox import transfer
from dockyard.rollout.sandbox.check import SandboxSetting, choose_mechanism
from dockyard.rollout.sandbox.client import Command, Sandbox, SandboxStartError
from dockyard.rollout.sandbox.dockerfile import DockerfileError, SandboxImage, read_image
from dockyard.rollout.sandbox.file_ops import ErrandError
from dockyard.rollout.sandbox.launch import SandboxLimits, is_below
from dockyard.rollout.sandbox.transfer import Entry, Stream
from dockyard.rollout.verifier import ABOVE_TESTS

DEFAULT_STORAGE_MB = 1024
DEFAULT_MEMORY_MB = 4096
DEFAULT_WORKDIR = "/app"
TRANSFER_TIMEOUT_S = 600
TIMED_OUT = 124
BASE_ENV = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "SHELL": "/bin/bash",
    "TAR_OPTIONS": "--no-same-owner",  # tar run by root would give files to users that do not exist here
    "USER": "root",
}
WIPED = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/root", "/tests", "/logs/verifier")
OPEN = ("/tmp", "/var/tmp", "/dev/shm")


class SandboxEnvironment(BaseEnvironment):
    """One sandbox per trial. If the driver is killed, no process and no file remains."""

    def __init__(
        self,
        *args: Any,
        network: bool = False,
        max_processes: int = 256,
        mechanism: SandboxSetting = "auto",
        **kwargs: Any,
    ) -> None:
        """`network` shares the host's network, including its loopback, with tasks whose policy is public."""
        self._wants_network = network
        self._mechanism: SandboxSetting = mechanism
        self._max_processes = max_processes
        self._sandbox: Sandbox | None = None
        self._image = SandboxImage(context=Path())
        super().__init__(*args, **kwargs)  # pyright: ignore[reportUnknownMemberType]

    @staticmethod
    @override
    def type() -> str:
        return "sandbox"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Declare no memory limit, because memory is limited per process, not in total."""
        return EnvironmentResourceCapabilities(fractional_cpus=True)

    @override
    def _validate_definition(self) -> None:
        """Done by `start`: an error raised here would escape from `Trial.create` instead of failing the rollout."""

    @override
    async def start(self, force_build: bool) -> None:
        self._image = self._read_image()
        network = self._wants_network and self._network_is_public
        try:
            mechanism = choose_mechanism(self._mechanism)
            self._sandbox = await Sandbox.start(mechanism.name, self._limits, network=network)
        except (SandboxStartError, DockyardError) as error:
            message = f"no sandbox can start here: {error}. `dockyard doctor` prints the fix"
            raise SandboxBuildFailedError(message) from error
        try:
            await self._place(self._image.entries)
            if self._workdir != DEFAULT_WORKDIR:
                await self._errand("make_folder", self._workdir)
            await self._upload_environment_dir_after_start()
        except RuntimeError as error:
            await self.stop(delete=True)
            raise SandboxBuildFailedError(f"`{self.environment_name}` does not fit into a sandbox: {error}") from error

    @override
    async def stop(self, delete: bool) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.stop()

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
        self._require_root(user)
        bash = Command(
            argv=("/bin/bash", "-c", command),
            cwd=str(PurePosixPath(self._workdir, cwd or "")),
            env=BASE_ENV | self._image.env | (self._merge_env(env) or {}),
            max_processes=self._max_processes,
            max_memory_bytes=self._limits.memory_bytes,
        )
        stdout, stderr = Output(), Output()
        try:
            code = await self._running().run(bash, stdout=stdout, stderr=stderr, timeout_s=timeout_sec)
        except TimeoutError:  # not passed on: Harbor would take it for the agent's time limit
            stderr.write(f"\n[killed after {timeout_sec} s]\n".encode())
            code = TIMED_OUT
        return ExecResult(stdout=stdout.text(), stderr=stderr.text(), return_code=code)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._send("write_file", target_path, transfer.pack_file, Path(source_path))

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._send("write_folder", target_dir, transfer.pack_contents, Path(source_dir))

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._fetch("read_file", source_path, transfer.unpack_record, Path(target_path))

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Download regular files and folders, but no links."""
        await self._fetch("read_folder", source_dir, transfer.unpack_records, Path(target_dir))

    async def seal(self) -> None:
        """Kill every process of the agent and empty the folders where it could have manipulated the tests.

        A folder that contains the working folder is kept. Files that the Dockerfile copied into an emptied folder are
        restored.
        """
        await self._running().kill_all()
        wiped = [folder for folder in WIPED if not is_below(self._workdir, [folder])]
        gone = [] if self._workdir == "/" else list(ABOVE_TESTS)
        await self._errand("wipe", wiped, list(OPEN), gone)
        await self._place([entry for entry in self._image.entries if is_below(entry.target, wiped)])

    @property
    def _workdir(self) -> str:
        return self.task_env_config.workdir or self._image.workdir or DEFAULT_WORKDIR

    @property
    def _storage_bytes(self) -> int:
        return (self._effective_storage_mb or DEFAULT_STORAGE_MB) << 20

    @property
    def _limits(self) -> SandboxLimits:
        memory_bytes = (self._effective_memory_mb or DEFAULT_MEMORY_MB) << 20
        return SandboxLimits(
            storage_bytes=self._storage_bytes, memory_bytes=memory_bytes, max_processes=self._max_processes
        )

    def _read_image(self) -> SandboxImage:
        dockerfile = self.environment_dir / DOCKERFILE_NAME
        try:
            if (self.environment_dir / COMPOSE_FILE_NAME).exists():
                raise DockerfileError(f"its `{COMPOSE_FILE_NAME}` needs containers")
            return read_image(dockerfile) if dockerfile.exists() else SandboxImage(context=self.environment_dir)
        except DockerfileError as error:
            message = f'`{self.environment_name}` cannot run in a sandbox: {error}. Use `environment.type = "docker"`'
            raise SandboxBuildFailedError(message) from None

    def _require_root(self, user: str | int | None) -> None:
        wanted = self._resolve_user(user)
        if wanted not in (None, "root", "0", 0):
            message = f'user `{wanted}`: a sandbox has no user but root. Use `environment.type = "docker"`'
            raise SandboxBuildFailedError(message)

    def _running(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeError("the sandbox is not running")
        return self._sandbox

    async def _place(self, entries: list[Entry]) -> None:
        if entries:
            await self._send("write_folder", "/", transfer.pack, entries)

    async def _send[S](self, errand: str, target: str, pack: Callable[[S], Stream], source: S) -> None:
        stream = await asyncio.to_thread(pack, source)
        await self._errand(errand, target, stream=stream)

    async def _fetch(self, errand: str, source: str, unpack: Callable[[Stream, Path], None], target: Path) -> None:
        stream = Stream.with_room_for(self._storage_bytes)
        await self._errand(errand, source, self._storage_bytes, stream=stream)
        await asyncio.to_thread(unpack, stream, target)

    async def _errand(self, name: str, place: str | list[str], *args: object, stream: Stream | None = None) -> None:
        where = f"`{place if isinstance(place, str) else ' '.join(place)}` in the sandbox"
        fd = None if stream is None else stream.fd
        try:
            await self._running().errand(name, place, *args, stream=fd, timeout_s=TRANSFER_TIMEOUT_S)
        except TimeoutError:
            raise RuntimeError(f"{where}: not done after {TRANSFER_TIMEOUT_S} s") from None
        except ErrandError as error:
            raise RuntimeError(f"{where}: {error}") from None
