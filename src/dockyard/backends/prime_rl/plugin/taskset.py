"""Harbor's tasks as verifiers asks for them. A task is scored by what its trial left on the trace."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf

from dockyard.backends.launch import read_task_list
from dockyard.errors import UsageError
from dockyard.tasks.folder import load_tasks
from dockyard.types import Task

PLUGIN = "harbor_env"
"""What verifiers imports."""


class HarborTaskData(vf.TaskData):
    """Which task it is. The folder is read where the trial runs."""

    task_dir: str = ""


class HarborTask(vf.Task[HarborTaskData]):
    """One Harbor task."""

    @vf.reward(weight=1.0)
    async def harbor(self, trace: vf.Trace) -> float:
        """What the task's tests gave. A rollout without it is not to be trained on, so that it is an error here."""
        outcome: dict[str, Any] = trace.info.get(PLUGIN, {})
        if outcome.get("reward") is None:
            raise ValueError("the trial ended without a reward, through no fault of the policy")
        return float(outcome["reward"])


class HarborTasksetConfig(vf.TasksetConfig):
    """Where the tasks are: in a folder, or in the folder of a run that `dockyard backend` began."""

    id: str = PLUGIN
    tasks_dir: Path | None = None
    """A Harbor task, or a folder of them."""
    run_dir: Path | None = None
    """A run's folder, whose list of tasks is taken."""
    split: Literal["train", "heldout"] = "train"
    """Of a run's tasks."""


class HarborTaskset(vf.Taskset[HarborTask, HarborTasksetConfig]):
    """The tasks of a folder, or of a run."""

    def load(self) -> Iterator[HarborTask]:
        for number, task in enumerate(find_tasks(self.config)):
            data = HarborTaskData(idx=number, name=task.name, task_dir=str(task.path), prompt=_instruction(task))
            yield HarborTask(data, self.config.task)


def find_tasks(config: HarborTasksetConfig) -> list[Task]:
    """The tasks that the settings name."""
    match config.tasks_dir, config.run_dir:
        case Path() as folder, None:
            return load_tasks(folder.absolute())
        case None, Path() as run:
            sets = read_task_list(run)
            return sets.train if config.split == "train" else sets.heldout
        case _:
            hint = "`tasks_dir` names a folder of Harbor tasks, `run_dir` a run that `dockyard backend prime-rl` began"
            raise UsageError("a taskset `harbor_env` needs one of `tasks_dir` and `run_dir`", hint=hint)


def _instruction(task: Task) -> str:
    """For who reads the trace: the agent gets it from Harbor, and a task of several steps has several."""
    file = task.path / "instruction.md"
    return file.read_text(encoding="utf-8") if file.is_file() else task.name
