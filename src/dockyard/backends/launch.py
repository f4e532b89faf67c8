"""Run on another engine: how each setting is supported there, the command to start, and the start itself.

A `Backend` turns a run's settings into a command. The command runs as a child process that stops with this one, while
the run folder is locked. The tasks are resolved once and written to a file that all processes of the run read, on any
host.
"""

import asyncio
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter, ValidationError

from dockyard import supervise
from dockyard.collect.task_sets import TaskSets, task_sets
from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.rollout.blame import DockerUnreachableError
from dockyard.rollout.docker.docker_cli import DockerError
from dockyard.rollout.docker.site import remove_leftovers
from dockyard.run_dir.durable import disk_errors, write_atomically
from dockyard.run_dir.run import RunDir, RunPaths
from dockyard.settings.load import Provenance, setting_text
from dockyard.settings.messages import SettingProblem, raise_if_any
from dockyard.tasks.order import with_steps
from dockyard.types import Task

_FORMAT = TypeAdapter(TaskSets)


def write_task_list(run: RunDir) -> TaskSets:
    """Write the list of the run's tasks if there is none yet, and return it. A resumed run keeps its list."""
    if not run.paths.task_list.exists():
        found = task_sets(run)
        anywhere = TaskSets(train=_anchored(found.train), heldout=_anchored(found.heldout))
        write_atomically(run.paths.task_list, _FORMAT.dump_json(anywhere, indent=1))
    return read_task_list(run.path)


def read_task_list(folder: Path) -> TaskSets:
    """Read the task list of the run in this folder."""
    file = RunPaths(folder).task_list
    try:
        return _FORMAT.validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        hint = "`dockyard backend` writes it when it starts a run"
        raise DockyardError(f"`{file}` is not a list of tasks: {error}", hint=hint) from None


def _anchored(tasks: list[Task]) -> list[Task]:
    return [replace(task, path=task.path.absolute()) for task in tasks]


logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 60.0
"""Time that a command has to stop after it was asked to."""
_OWN_SECTIONS = ("slime", "prime_rl")
"""Sections that only the backend of that name reads. A run file may have several."""


@dataclass(frozen=True, slots=True)
class Supported:
    """The setting has the same effect under the backend as under `dockyard train`."""

    by: str
    """What applies it: the backend's options, or `rollouts` where Dockyard's own rollout code does."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """The setting would have no effect, so a run that sets it explicitly is refused."""

    why: str
    """Completes the sentence "slime ignores `trainer.lora_r`, ...: "."""


type Support = Supported | Ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLaunch:
    """The command of a backend for one run, and what it needs."""

    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name -> text. Written to the backend's folder in the run (`RunDir.backend`) before the command starts."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that are added to those of this process."""
    directory: Path | None = None
    """Working directory of the command. None: that of this process."""
    notes: tuple[str, ...] = ()
    """Lines for the user: the resolved defaults, and how the backend differs from `dockyard train`."""


class Backend(Protocol):
    """A system that runs the training loop itself and calls Dockyard for rollouts."""

    @property
    def name(self) -> str:
        """The name on the command line."""
        ...

    def support(self, key: str, config: RunConfig) -> Support:
        """Return whether the backend supports the setting with this dotted key. Raise `KeyError` for unknown keys."""
        ...

    def check(self, config: RunConfig) -> None:
        """Raise an error if the run cannot be launched on this machine. Called before the run's folder is created."""
        ...

    def plan(self, config: RunConfig, folder: Path) -> BackendLaunch:
        """Return the command for a run in this folder. Has no side effects; refuses contradictory settings."""
        ...


def refuse_ignored(backend: Backend, config: RunConfig, written: Provenance) -> None:
    """Raise an error that names every explicitly set setting that the backend would ignore."""
    ignored = {
        key: support.why
        for key in written.places
        if key.partition(".")[0] not in _OWN_SECTIONS
        if isinstance(support := backend.support(key, config), Ignored)
    }
    hint = f"remove it, or add `--drop {','.join(ignored)}`"
    raise_if_any(
        [
            SettingProblem(
                f"{backend.name} ignores `{key}`, which is `{setting_text(config, key)}` {written.places[key]}: {why}",
                hint,
            )
            for key, why in ignored.items()
        ]
    )


def prepare(backend: Backend, run: RunDir) -> BackendLaunch:
    """Write the task list, which all processes of the run share, and the files that the command reads."""
    tasks = write_task_list(run)
    if run.config.tasks.is_custom and not tasks.heldout:
        raise UsageError(
            f"`tasks.source` is `{run.config.tasks.source}`, which has no held-out tasks, but {backend.name} evaluates",
            hint="`--tasks.heldout DIR` or `--tasks.heldout_share 0.1` holds out tasks",
        )
    launch = backend.plan(with_steps(run.config, len(tasks.train)), run.path)
    with disk_errors(run.path):
        run.paths.backend.mkdir(exist_ok=True)
        for name, text in launch.files.items():
            write_atomically(run.paths.backend / name, text.encode())
    return launch


def start(launch: BackendLaunch) -> int:
    """Run the command and return its exit code. An interrupt stops the command first."""
    environment = os.environ | launch.environment
    program = launch.command[0]
    if shutil.which(program, path=environment.get("PATH")) is None:
        hint = "`--write` only writes the files, so that you can start the run elsewhere"
        raise DockyardError(f"`{program}` is not installed", hint=hint)
    words = [sys.executable, "-I", supervise.__file__, str(_STOP_TIMEOUT_S), *launch.command]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=2, env=environment, cwd=launch.directory, start_new_session=True
    )
    assert process.stdin is not None
    try:
        return process.wait()
    finally:
        process.stdin.close()  # the supervisor stops the command, as it does when this process dies
        process.wait()


def clear_away(environment_type: str) -> None:
    """Remove containers that were left behind by killed processes of the command."""
    if environment_type != "docker":
        return
    with suppress(DockerError, DockerUnreachableError, TimeoutError):  # the next run removes them
        if leftovers := asyncio.run(remove_leftovers()):
            logger.info("removed leftovers of the run: %s", leftovers)
