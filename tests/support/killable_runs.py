"""Runs of the tiny model that are killed and resumed: real trials in sandboxes, the same bits every time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from processes import Process, descendants
from tiny_policy import tiny_model_dir

PATIENCE_S = 1200  # only against hanging
COMMAND = [sys.executable, "-c", "import sys; from dockyard.cli import main; sys.exit(main())", "train"]
TASKS_PER_STEP, GROUP_SIZE = 2, 4
# A random model solves nothing, so the reward is the length of what it said, modulo 7: every group has a difference.
TEST_SH = 'echo "$(( $(wc -c < /app/reply.txt) % 7 ))" > /logs/verifier/reward.txt\n'


def write_tasks(folder: Path, count: int) -> None:
    for index in range(count):
        task = folder / f"task-{index}"
        for name, text in {
            "task.toml": f'schema_version = "1.4"\n[task]\nname = "test/task-{index}"\n',
            "instruction.md": f"Say something about the number {index}.\n",
            "environment/Dockerfile": "FROM scratch\n",
            "tests/test.sh": TEST_SH,
        }.items():
            (task / name).parent.mkdir(parents=True, exist_ok=True)
            (task / name).write_text(text)


def settings(folder: Path, steps: int) -> dict[str, object]:
    """Of a run on tasks that are written into this folder."""
    write_tasks(folder / "train", 6)
    return {
        "steps": steps,
        "seed": 3,
        "model.name": tiny_model_dir(),
        "model.device": "cpu",
        "tasks.train": folder / "train",
        "agent.name": "reply_agent:ReplyAgent",
        "environment.type": "sandbox",
        "engine.deterministic": "true",
        "sampling.max_new_tokens": 24,
        "rollout.concurrency": 4,
        "grpo.group_size": GROUP_SIZE,
        "grpo.tasks_per_step": TASKS_PER_STEP,
        "trainer.lr": 0.01,
        "trainer.save_every": 2,
    }


def num_recorded(run: Path) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in run.glob("rollouts/*.jsonl"))


def adapter(run: Path, version: int) -> bytes:
    return (run / f"adapters/v{version:05}/adapter_model.safetensors").read_bytes()


def start(arguments: list[str], log: Path, cwd: Path | None = None) -> subprocess.Popen[bytes]:
    """`dockyard train` in a process of its own, which finds the modules beside this one."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with log.open("ab") as out:
        return subprocess.Popen([*COMMAND, *arguments], env=environment, stdout=out, stderr=out, cwd=cwd)


def kill_after(process: subprocess.Popen[bytes], run: Path, recorded: int, delay_s: float) -> set[Process]:
    """Returns what it had started and what should have ended with it."""
    deadline = time.monotonic() + PATIENCE_S
    while num_recorded(run) < recorded:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(delay_s)
    started = descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return started
