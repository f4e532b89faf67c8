"""Shared by these scripts: turn their arguments into the settings of one `dockyard train`."""

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from dockyard.cli import main
from dockyard.cli.args import positive
from dockyard.settings.load import read_dotenv
from dockyard.verbs import RunTraining

__all__ = [
    "DATASET",
    "NUM_TEST_TASKS",
    "arguments_of",
    "engine_settings",
    "new_run_dir",
    "positive",
    "tasks_settings",
    "train",
]

MODELS = (
    "Qwen/Qwen2.5-Coder-7B-Instruct",
    "Qwen/Qwen2.5-Coder-32B-Instruct",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "Kwai-Klear/Klear-AgentForge-8B-SFT",
)
"""Tested models. Any other model with a chat template works too."""
DATASET = "swebench-verified@1.0"
C2BUG_DATASET = "TwelfthStar/c2bug_tasks_django_Jan-22-2026"
NUM_TEST_TASKS = 5


def tasks_settings(source: str, dataset: str | None, c2bug_dataset: str | None, num_tasks: int) -> dict[str, Any]:
    """Return the settings of the task source. Each task is attempted in one step."""
    settings: dict[str, Any] = {"tasks.limit": num_tasks, "tasks.passes": 1}
    if source == "c2bug":
        return settings | {"tasks.source": "c2bug", "tasks.dataset": c2bug_dataset or C2BUG_DATASET}
    name = dataset or DATASET
    if Path(name).is_dir():
        return settings | {"tasks.source": "folder", "tasks.train": name}
    rows = "/" in name or Path(name).is_file()  # of a file or of the Hub; Harbor's registry has `name@version`
    return settings | {"tasks.source": "swebench" if rows else "harbor", "tasks.dataset": name}


def engine_settings(base_url: str | None, api_key: str | None) -> dict[str, Any]:
    """Return the settings of an inference server. The key is passed in the environment, so that no file holds it."""
    if base_url is None:
        return {}
    read_dotenv()
    if api_key:
        os.environ["OPENAI_API_KEY"] = api_key
    has_key = bool(os.environ.get("OPENAI_API_KEY"))
    return {"engine.type": "openai", "engine.url": base_url} | (
        {"engine.api_key_env": "OPENAI_API_KEY"} if has_key else {}
    )


def new_run_dir(parent: str | Path, name: str) -> Path:
    """Return a new folder name for each run."""
    return Path(parent) / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def train(settings: Mapping[str, Any], flags: Sequence[str] = (), run_training: RunTraining | None = None) -> int:
    """Run `dockyard train` with these settings, by its own loop or `run_training`, and return the exit code."""
    return main(["train", *arguments_of(settings), *flags], run_training=run_training)


def arguments_of(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as command-line arguments."""
    return [f"--{key}={value}" for key, value in settings.items()]
