"""`kill -9` of a trainer with eight trials running, then `--resume`: nothing stays behind, nothing is made twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from docker_engine import BASE, docker
from processes import descendants, wait_until_gone
from tiny_policy import tiny_model_dir
from trials import write_task

from dockyard.rollout.docker.site import OWNER_LABEL, Owner

COMMAND = [sys.executable, "-c", "import sys; from dockyard.cli import main; sys.exit(main())", "train"]
GROUP_SIZE, TASKS_PER_STEP, AT_ONCE = 6, 2, 8
PATIENCE_S = 1200  # only against hanging
# A random model solves nothing, so the reward is the length of what it said.
TEST_SH = 'echo "$(( $(wc -c < /app/reply.txt) % 7 ))" > /logs/verifier/reward.txt\n'

pytestmark = pytest.mark.train


def settings(folder: Path) -> list[str]:
    """Of a run that waits when its first rollout is finished, until a folder is removed."""
    (folder / "hold" / "2").mkdir(parents=True)
    for index in range(TASKS_PER_STEP):
        image = f'[environment]\ndocker_image = "{BASE}"\nworkdir = "/app"\n'
        write_task(folder / "tasks" / f"task-{index}", TEST_SH, "", toml=image, environment__keep="-")
    values = {
        "run_dir": folder / "run",
        "steps": 1,
        "model.name": tiny_model_dir(),
        "model.device": "cpu",
        "tasks.train": folder / "tasks",
        "agent.name": "reply_agent:HeldAgent",
        "agent.kwargs.hold": folder / "hold",
        "environment.type": "docker",
        "sampling.max_new_tokens": 24,
        "rollout.concurrency": AT_ONCE,
        "grpo.group_size": GROUP_SIZE,
        "grpo.tasks_per_step": TASKS_PER_STEP,
        "trainer.lr": 0.01,
    }
    return [f"--{key}={value}" for key, value in values.items()]


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    with log.open("ab") as out:
        return subprocess.Popen([*COMMAND, *arguments], env=environment, stdout=out, stderr=out)


def recorded(folder: Path) -> list[bytes]:
    file = folder / "run/rollouts/step-00000.jsonl"
    return file.read_bytes().splitlines() if file.exists() else []


def owned_by(owner: Owner) -> dict[str, list[str]]:
    label = f"label={OWNER_LABEL}={owner.label}"
    return {
        "containers": docker("ps", "--quiet", "--all", "--filter", label).split(),
        "networks": docker("network", "ls", "--quiet", "--filter", label).split(),
    }


def names(lines: list[bytes]) -> list[tuple[int, int]]:
    return sorted((item["group"], item["attempt"]) for item in map(json.loads, lines))


def test_a_killed_trainer_leaves_nothing_once_resumed_and_only_what_was_unfinished_is_made_again(tmp_path: Path):
    log = tmp_path / "log"
    killed = start(settings(tmp_path), log)
    owner = Owner.of(killed.pid)
    deadline = time.monotonic() + PATIENCE_S
    # One is finished, and eight are at work.
    while not recorded(tmp_path) or len(owned_by(owner)["containers"]) < AT_ONCE:
        assert killed.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    killed.send_signal(signal.SIGSTOP)  # from here on it removes nothing, and other tests' runs nothing of it
    clients = descendants(killed.pid)
    left = owned_by(owner)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    kept = recorded(tmp_path)
    assert len(left["containers"]) >= AT_ONCE
    assert left["networks"]

    (tmp_path / "hold" / "2").rmdir()
    resumed = start([f"--resume={tmp_path / 'run'}"], log)
    second = Owner.of(resumed.pid)
    assert resumed.wait(timeout=PATIENCE_S) == 0, log.read_text()
    assert owned_by(owner) == owned_by(second) == {"containers": [], "networks": []}
    wait_until_gone(clients)
    lines = recorded(tmp_path)
    assert lines[: len(kept)] == kept
    everything = [(group, attempt) for group in range(TASKS_PER_STEP) for attempt in range(GROUP_SIZE)]
    assert names(lines) == everything  # each once
