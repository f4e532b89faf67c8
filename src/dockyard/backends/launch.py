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
from dockyard.errors import DockyardError
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
    """The run's tasks, found and written down; those of a resumed run are as they were."""
    if not run.paths.task_list.exists():
        found = task_sets(run)
        anywhere = TaskSets(train=_anchored(found.train), heldout=_anchored(found.heldout))
        write_atomically(run.paths.task_list, _FORMAT.dump_json(anywhere, indent=1))
    return read_task_list(run.path)


def read_task_list(folder: Path) -> TaskSets:
    """The tasks of the run in this folder."""
    file = RunPaths(folder).task_list
    try:
        return _FORMAT.validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        hint = "`dockyard backend` writes it when it starts a run"
        raise DockyardError(f"`{file}` is no list of tasks: {error}", hint=hint) from None


def _anchored(tasks: list[Task]) -> list[Task]:
    return [replace(task, path=task.path.absolute()) for task in tasks]


logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0
"""How long a command that is asked to stop may take over it."""
_OWN_SECTIONS = ("slime", "prime_rl")
"""Read by the backend of that name alone; one run file may have several."""


@dataclass(frozen=True, slots=True)
class Carried:
    """The engine does what the setting says."""

    by: str
    """What carries it there: an option of the engine, or `rollouts` where our own code heeds it as ever."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """Nothing would come of the setting, so a run that has it written is refused."""

    why: str
    """Ends the sentence "slime ignores `trainer.lora_r`, ...: "."""


type Support = Carried | Ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLaunch:
    """What a backend starts for a run."""

    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name -> text, written to the backend's folder of the run (`RunPaths.backend`) first."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Over our own."""
    directory: Path | None = None
    """Where the command runs; None: where we do."""
    notes: tuple[str, ...] = ()
    """For the user: what the defaults came to, and how this engine differs from `dockyard train`."""


class Backend(Protocol):
    """An engine that owns the training loop and calls our rollouts."""

    @property
    def name(self) -> str:
        """As on the command line."""
        ...

    def fate(self, key: str, config: RunConfig) -> Support:
        """What becomes of a setting, by its dotted key."""
        ...

    def check(self, config: RunConfig) -> None:
        """Refuse what cannot be launched on this machine, before the run's folder is made."""
        ...

    def plan(self, config: RunConfig, folder: Path) -> BackendLaunch:
        """The command for a run in this folder. Touches nothing; refuses settings that contradict each other."""
        ...


def refuse_ignored(backend: Backend, config: RunConfig, written: Provenance) -> None:
    """An error that names every setting somebody wrote and nothing would come of."""
    ignored = {
        key: fate.why
        for key in written.places
        if key.partition(".")[0] not in _OWN_SECTIONS
        if isinstance(fate := backend.fate(key, config), Ignored)
    }
    drop = f"`--drop {','.join(ignored)}` runs without"
    raise_if_any(
        [
            SettingProblem(
                f"{backend.name} ignores `{key}`, which is `{setting_text(config, key)}` {written.places[key]}: {why}",
                f"remove it; {drop}",
            )
            for key, why in ignored.items()
        ]
    )


def prepare(backend: Backend, run: RunDir) -> BackendLaunch:
    """Find the run's tasks, once for all processes of the run, and write what the command reads."""
    tasks = write_task_list(run)
    launch = backend.plan(with_steps(run.config, len(tasks.train)), run.path)
    with disk_errors(run.path):
        run.paths.backend.mkdir(exist_ok=True)
        for name, text in launch.files.items():
            write_atomically(run.paths.backend / name, text.encode())
    return launch


def start(launch: BackendLaunch) -> int:
    """Run the command to its end; its exit code. An interrupt stops it first."""
    environment = os.environ | launch.environment
    program = launch.command[0]
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise DockyardError(f"`{program}` is not installed", hint="`--write` writes the files only, to start elsewhere")
    words = [sys.executable, "-I", supervise.__file__, str(_PATIENCE_S), *launch.command]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=2, env=environment, cwd=launch.directory, start_new_session=True
    )
    assert process.stdin is not None
    try:
        return process.wait()
    finally:
        process.stdin.close()  # the warden ends the command, as it does when we die
        process.wait()


def clear_away(environment_type: str) -> None:
    """Remove containers that processes of the command left behind when they were killed."""
    if environment_type != "docker":
        return
    with suppress(DockerError, DockerUnreachableError, TimeoutError):  # the next run's janitor removes them
        if leftovers := asyncio.run(remove_leftovers()):
            logger.info("removed what the run left behind: %s", leftovers)
