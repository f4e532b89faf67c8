"""Finished Harbor trials as they lie on disk, written by hand."""

import json
from pathlib import Path
from typing import Any

RAN = {"started_at": "2026-01-01T00:00:01Z", "finished_at": "2026-01-01T00:00:03Z"}


def raised(kind: str) -> dict[str, str]:
    return {
        "exception_type": kind,
        "exception_message": "it broke",
        "exception_traceback": "",
        "occurred_at": "2026-01-01T00:00:03Z",
    }


def write_trial(job: Path, name: str, *, reward: float | None = 1.0, agent: str = "aider", **more: Any) -> Path:
    task = {"path": str(job.parent / "tasks" / name.partition("__")[0])}
    result = {
        "task_name": "org/any",
        "trial_name": name,
        "trial_uri": f"file://{job / name}",
        "task_id": task,
        "task_checksum": "0",
        "config": {"task": task},
        "agent_info": {"name": agent, "version": "1"},
        "started_at": "2026-01-01T00:00:00Z",
        "finished_at": "2026-01-01T00:00:04Z",
        "agent_execution": RAN,
        "verifier_result": None if reward is None else {"rewards": {"reward": reward}},
    }
    folder = job / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "result.json").write_text(json.dumps(result | more))
    return folder
