"""Harbor tasks as a verifiers taskset. A task's score is what its trial recorded on the trace."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf

from dockyard.backends.launch import read_task_list
from dockyard.backends.prime_rl.toml import PLUGIN
from dockyard.errors import UsageError
from dockyard.tasks.folder import load_tasks
from dockyard.types import Task


class HarborTaskData(vf.TaskData):
    """Identifies a task. Its folder is read where the trial runs."""

    task_dir: str = ""


class HarborTask(vf.Task[HarborTaskData]):
    """One Harbor task."""

    @vf.reward(weight=1.0)
    async def harbor(self, trace: vf.Trace) -> float:
        """Return the reward of the trial. A rollout without one must not be trained on, so this raises."""
        outcome: dict[str, Any] = trace.info.get(PLUGIN, {})
        if outcome.get("reward") is None:
            raise ValueError("the trial ended without a reward because of an infrastructure failure")
        return float(outcome["reward"])


class HarborTasksetConfig(vf.TasksetConfig):
    """Where the tasks are: in a folder, or in a run that `dockyard backend` started."""

    id: str = PLUGIN
    tasks_dir: Path | None = None
    """A Harbor task, or a folder of them."""
    run_dir: Path | None = None
    """The folder of a run whose task list is used."""
    split: Literal["train", "heldout"] = "train"
    """Which tasks of the run."""


class HarborTaskset(vf.Taskset[HarborTask, HarborTasksetConfig]):
    """The tasks of a folder, or of a run."""

    def load(self) -> Iterator[HarborTask]:
        for number, task in enumerate(find_tasks(self.config)):
            data = HarborTaskData(idx=number, name=task.name, task_dir=str(task.path), prompt=_instruction(task))
            yield HarborTask(data, self.config.task)


def find_tasks(config: HarborTasksetConfig) -> list[Task]:
    """Return the tasks that the settings name."""
    match config.tasks_dir, config.run_dir:
        case Path() as folder, None:
            return load_tasks(folder.absolute())
        case None, Path() as run:
            sets = read_task_list(run)
            return sets.train if config.split == "train" else sets.heldout
        case _:
            hint = (
                "`tasks_dir` names a folder of Harbor tasks, `run_dir` a run that `dockyard backend prime-rl` started"
            )
            raise UsageError("a taskset `harbor_env` needs one of `tasks_dir` and `run_dir`", hint=hint)


def _instruction(task: Task) -> str:
    """Shown with the trace only: the agent gets its instructions from Harbor, and a task may have several steps."""
    file = task.path / "instruction.md"
    return file.read_text(encoding="utf-8") if file.is_file() else task.name
