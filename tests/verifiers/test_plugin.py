"""What verifiers finds under the id `harbor_env`, and what the plug-in refuses before anything starts."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from trials import skip_without_terminals, write_task
from verifiers.v1.utils.loaders import load_environment, load_harness, load_taskset
from verifiers_server import env_config, run_folder

from dockyard.backends.launch import write_task_list
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.run import RunDir

pytestmark = pytest.mark.filterwarnings("default")

SANDBOX = {"environment_type": "sandbox"}


def test_the_plug_in_is_loaded_by_its_id_and_needs_no_remote_runtime(tmp_path: Path):
    skip_without_terminals()
    write_task(tmp_path / "tasks" / "b", "true\n")
    write_task(tmp_path / "tasks" / "a", "true\n")
    env: Any = load_environment(env_config({"tasks_dir": str(tmp_path / "tasks")}, SANDBOX))
    assert type(env).__name__ == "HarborEnvironment"
    assert env.config.agent.runtime.type == "subprocess"
    assert env.config.agent.harness.agent == "terminus-2"
    tasks = list(env.taskset)
    assert [task.data.name for task in tasks] == ["a", "b"]
    assert tasks[0].data.prompt == "Do it.\n"


def test_importing_the_plug_in_starts_nothing_and_loads_no_torch():
    code = (
        "import sys, threading, multiprocessing, harbor_env; "
        "print('torch' in sys.modules, threading.active_count(), multiprocessing.active_children())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "False 1 []", done.stderr


def test_a_runs_folder_gives_tasks_by_split_and_settings(tmp_path: Path):
    for half in ("train", "heldout"):
        write_task(tmp_path / half / f"{half}-1", "true\n")
    folders = {half: str(tmp_path / half) for half in ("train", "heldout")}
    folder = run_folder(tmp_path / "run", {"tasks": folders, "agent": {"name": "shell", "max_turns": 3}})
    with RunDir.resume(Path(folder)) as run:
        write_task_list(run)
    for half in ("train", "heldout"):
        config = env_config({"run_dir": folder, "split": half}, {"run_dir": folder})
        (task,) = load_taskset(config.taskset)
        assert task.data.name == f"{half}-1"
    harness: Any = load_harness(config.agent_harnesses()["agent"])
    assert harness._run.agent.max_turns == 3


@pytest.mark.parametrize("taskset", [{}, {"tasks_dir": "/a", "run_dir": "/b"}])
def test_tasks_are_named_by_exactly_one_folder(taskset: dict[str, Any]):
    with pytest.raises(UsageError, match="one of `tasks_dir` and `run_dir`"):
        list(load_taskset(env_config(taskset, SANDBOX).taskset))


def test_settings_beside_a_runs_own_are_refused(tmp_path: Path):
    folder = run_folder(tmp_path / "run", {})
    config = env_config({"run_dir": folder}, {"run_dir": folder, "agent": "shell"})
    with pytest.raises(UsageError, match="`agent` is `shell`, but `run_dir`"):
        load_harness(config.agent_harnesses()["agent"])


@pytest.mark.parametrize(
    ("harness", "why"),
    [
        ({"agent": "termnius-2"}, "`termnius-2`, which is not an agent"),
        ({"environment_type": "doker"}, "which is not an environment"),
        ({"environment_kwargs": {"nettwork": True}}, "is not an option of"),
    ],
)
def test_an_agent_or_environment_that_cannot_run_is_refused_when_the_server_starts(harness: dict[str, Any], why: str):
    config = env_config({"tasks_dir": "/a"}, SANDBOX | {"agent": "shell"} | harness)
    with pytest.raises(UsageError, match=why):
        load_harness(config.agent_harnesses()["agent"])


def test_what_would_let_a_policy_escape_its_zero_or_go_unused_is_refused():
    with pytest.raises(ValidationError, match="trials run in Harbor environments"):
        env_config({"tasks_dir": "/a"}, SANDBOX, runtime={"type": "docker"})
    data = env_config({"tasks_dir": "/a"}, SANDBOX).model_dump() | {"timeout": {"episode": 60}}
    with pytest.raises(ValidationError, match="would not get a reward of 0"):
        type(env_config({"tasks_dir": "/a"}, SANDBOX)).model_validate(data)


@pytest.mark.skipif(find_spec("verifiers.legacy") is not None, reason="this release still has them")
def test_releases_without_the_first_kind_of_environment_are_told_the_other_way(tmp_path: Path):
    from harbor_env import load_environment as load_legacy

    with pytest.raises(DockyardError, match="no longer supports `load_environment`"):
        load_legacy(tasks_dir=tmp_path)
