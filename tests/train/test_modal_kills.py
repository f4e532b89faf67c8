"""`kill -9` of the policy on Modal's side and of the caller, in real runs: the same bits as plain `dockyard train`."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from killable_runs import GROUP_SIZE, adapter, num_recorded, settings
from processes import alive, descendants

from dockyard.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/harbor/harbor_grpo_modal.py"
STEPS = 4
PATIENCE_S = 1200  # only against hanging


def short_settings(folder: Path) -> dict[str, object]:
    return settings(folder, STEPS) | {"grpo.tasks_per_step": 1}


def arguments(values: dict[str, object], run: Path) -> list[str]:
    """The run's settings as the script takes them; what it has an option for is written as that."""
    options = {"model.name": "--model", "agent.name": "--agent", "environment.type": "--env", "trainer.lr": "--lr"}
    words = [f"{options.get(key, f'--{key}')}={value}" for key, value in values.items()]
    own = ["--tasks.passes=none", "--tasks.limit=none", f"--run_dir={run}"]
    return [f"--dataset={values['tasks.train']}", f"--n-samples={GROUP_SIZE}", "--kl-coef=0.001", *words, *own]


class ModalRun:
    """The script under Modal's stand-in."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self._stand_in = folder / "stand-in"
        self._log = folder / "log"
        self._environment = os.environ | {
            "PYTHONPATH": str(ROOT / "tests"),
            "MODAL_STAND_IN": str(self._stand_in),
            "DOCKYARD_MODAL_MOUNT": str(self._stand_in / "volume"),
        }

    @contextmanager
    def started(self, words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, ROOT / "tests/modal_stand_in.py", "run", SCRIPT, *words]
        with self._log.open("ab") as log:
            process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def policy_after(self, process: subprocess.Popen[bytes], recorded: int) -> int:
        """Wait for so many rollouts; returns the process that serves the policy just now."""
        deadline = time.monotonic() + PATIENCE_S
        while num_recorded(self.run) < recorded:
            assert process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)
        newest = max((self._stand_in / "calls").glob("*.pid"), key=lambda file: file.stat().st_mtime)
        return int(newest.read_text())

    @property
    def log(self) -> str:
        return self._log.read_text()


def plain_training(folder: Path) -> bytes:
    """The last adapter of `dockyard train`."""
    words = [f"--{key}={value}" for key, value in short_settings(folder).items()]
    assert main(["train", *words, f"--run_dir={folder / 'plain'}"]) == 0
    return adapter(folder / "plain", STEPS)


def test_a_run_whose_policy_and_whose_caller_are_killed_ends_with_the_bits_of_plain_training(tmp_path: Path):
    modal = ModalRun(tmp_path)
    with modal.started(arguments(short_settings(tmp_path), modal.run)) as process:
        os.kill(modal.policy_after(process, GROUP_SIZE + 1), signal.SIGKILL)  # what it learnt is nowhere but in records
        modal.policy_after(process, 3 * GROUP_SIZE + 1)
        assert "the policy answers again" in modal.log
        started = descendants(process.pid)
        process.kill()
        process.wait()
    deadline = time.monotonic() + PATIENCE_S
    while alive(started):
        assert time.monotonic() < deadline, "the policy or a sandbox was left behind"
        time.sleep(0.05)
    with modal.started(["--env=sandbox", f"--resume={modal.run}"]) as process:
        assert process.wait(PATIENCE_S) == 0, modal.log
    assert num_recorded(modal.run) == STEPS * GROUP_SIZE
    assert adapter(modal.run, STEPS) == plain_training(tmp_path)
