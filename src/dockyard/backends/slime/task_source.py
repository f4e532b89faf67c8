"""SLiME's data source: the run's training tasks in order, repeated without end. Its position survives a resume."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dockyard.backends.launch import read_task_list
from dockyard.backends.slime.classes import SampleEntry, SlimeSample, new_sample
from dockyard.backends.slime.samples import flat
from dockyard.backends.slime.worker import run_config, run_folder
from dockyard.errors import DockyardError
from dockyard.run_dir.durable import write_atomically
from dockyard.tasks.order import due


class SlimeDataSource:
    """The class for `--data-source-path`. The number of a group determines its task."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._config = run_config(args)
        self._tasks = read_task_list(run_folder(args)).train
        self._next = 0
        self._returned: list[int] = []
        """Groups that were given back. They are handed out first."""
        self._step_start = self._position()
        """The position at the start of the last step."""

    def get_samples(self, num_samples: int) -> list[list[SlimeSample]]:
        """Return this number of groups of pending samples. SLiME's loop calls it once per step."""
        self._step_start = self._position()
        again, self._returned = self._returned[:num_samples], self._returned[num_samples:]
        first, self._next = self._next, self._next + num_samples - len(again)
        return [self._group(number) for number in [*again, *range(first, self._next)]]

    def add_samples(self, samples: Sequence[Sequence[SampleEntry]]) -> None:
        """Take back unused groups. They start from the beginning when they are handed out again."""
        self._returned += [group[0].group_index or 0 for group in map(flat, samples)]

    def save(self, rollout_id: int) -> None:
        """Save the position for a run resumed after this step. `train_async.py` has already started the next step."""
        has_started_next = self._config.rollout.max_staleness > 0 and rollout_id + 1 < self._args.num_rollout
        file = _position_file(self._args.save, rollout_id)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(self._step_start if has_started_next else self._position()).encode())

    def load(self, rollout_id: int | None = None) -> None:
        """Restore the position after this step. Does nothing before the first."""
        if rollout_id is None or rollout_id < 0:
            return
        file = _position_file(self._args.load, rollout_id)
        try:
            place = json.loads(file.read_bytes())
        except FileNotFoundError:
            hint = "resume from a checkpoint of `dockyard backend slime`; without this file the tasks would start over"
            raise DockyardError(f"`{file}` does not exist", hint=hint) from None
        self._next, self._returned = place["next"], place["returned"]

    def __len__(self) -> int:
        return len(self._tasks)

    def _position(self) -> dict[str, Any]:
        return {"next": self._next, "returned": [*self._returned]}

    def _group(self, number: int) -> list[SlimeSample]:
        size = self._config.grpo.group_size
        [task] = due(self._tasks, number, 1, self._config.seed, kind_of=lambda task: task.kind)
        rows = (
            {
                "group_index": number,
                "index": number * size + attempt,
                "prompt": task.name,
                "label": task.name,
                "status": "pending",
                "metadata": {"task": task.name, "attempt": attempt},
            }
            for attempt in range(size)
        )
        return [new_sample(row) for row in rows]


def _position_file(folder: str, rollout_id: int) -> Path:
    return Path(folder, "rollout", f"dockyard_tasks_{rollout_id}.json")
