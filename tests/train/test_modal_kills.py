"""`kill -9` of the policy on Modal's side and of the caller, in real runs: the same bits as plain `dockyard train`."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Self

import pytest
from killable_runs import GROUP_SIZE, adapter, num_recorded, settings
from processes import descendants, wait_until_gone

from dockyard.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/harbor/harbor_grpo_modal.py"
STEPS = 3
SECOND, THIRD = GROUP_SIZE + 3, 2 * GROUP_SIZE + 3  # the rollouts that wait, from 1
PATIENCE_S = 1200  # only against hanging


def held_settings(folder: Path) -> dict[str, object]:
    """Of a run that waits in the middle of its second and of its third step, until a folder is removed."""
    for number in (SECOND, THIRD):
        (folder / "hold" / str(number)).mkdir(parents=True)
    held = {"agent.name": "reply_agent:HeldAgent", "agent.kwargs.hold": folder / "hold"}
    return settings(folder, STEPS) | {"grpo.tasks_per_step": 1} | held


def arguments(values: dict[str, object], run: Path) -> list[str]:
    """The run's settings as the script takes them; what it has an option for is written as that."""
    options = {"model.name": "--model", "agent.name": "--agent", "environment.type": "--env", "trainer.lr": "--lr"}
    words = [f"{options.get(key, f'--{key}')}={value}" for key, value in values.items()]
    own = ["--tasks.passes=none", "--tasks.limit=none", f"--run_dir={run}"]
    return [f"--dataset={values['tasks.train']}", f"--n-samples={GROUP_SIZE}", "--kl-coef=0.001", *words, *own]


class ModalRun:
    """The script under Modal's stand-in. Its processes are copies of one that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self._stand_in = folder / "stand-in"
        self._log = folder / "log"
        self._log.touch()

    def __enter__(self) -> Self:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT / "tests" / "support"),
            "MODAL_STAND_IN": str(self._stand_in),
            "DOCKYARD_MODAL_MOUNT": str(self._stand_in / "volume"),
            "OPENBLAS_NUM_THREADS": "1",  # a process without threads is copied whole
        }
        self._orders, theirs = Pipe()
        command = [sys.executable, str(ROOT / "tests/support/modal_stand_in.py"), "warm", str(theirs.fileno())]
        self._warm = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        """What it started ends with it."""
        self._warm.kill()
        self._warm.wait()
        self._orders.close()

    def start(self, *words: str) -> int:
        """Returns the caller's process."""
        self._orders.send(([str(SCRIPT), *words], self._log))
        return self._heard()

    def exit_code(self) -> int:
        """Of the caller, when it has ended."""
        return self._heard()

    def _heard(self) -> int:
        assert self._orders.poll(PATIENCE_S), self.log
        return self._orders.recv()

    def policy_after(self, recorded: int) -> int:
        """Wait for this number of rollouts; return the process that serves the policy."""
        deadline = time.monotonic() + PATIENCE_S
        while num_recorded(self.run) < recorded:
            assert not self._orders.poll(), self.log  # it has ended
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)
        return int((self._stand_in / "calls/serve_policy-0.pid").read_text())

    @property
    def log(self) -> str:
        return self._log.read_text()


def plain_training(values: dict[str, object], run: Path) -> bytes:
    """The last adapter of `dockyard train`."""
    assert main(["train", *(f"--{key}={value}" for key, value in values.items()), f"--run_dir={run}"]) == 0
    return adapter(run, STEPS)


def test_a_run_whose_policy_and_whose_caller_are_killed_ends_with_the_bits_of_plain_training(tmp_path: Path):
    values, hold = held_settings(tmp_path), tmp_path / "hold"
    with ModalRun(tmp_path) as modal:
        caller = modal.start(*arguments(values, modal.run))
        os.kill(modal.policy_after(SECOND - 1), signal.SIGKILL)  # what it learnt is nowhere but in records
        (hold / str(SECOND)).rmdir()
        modal.policy_after(THIRD - 1)
        assert "the policy answers again" in modal.log
        started = descendants(caller)
        os.kill(caller, signal.SIGKILL)
        assert modal.exit_code() == -signal.SIGKILL
        wait_until_gone(started)
        (hold / str(THIRD)).rmdir()
        modal.start("--env=sandbox", f"--resume={modal.run}")
        assert modal.exit_code() == 0, modal.log
    assert num_recorded(modal.run) == STEPS * GROUP_SIZE
    assert adapter(modal.run, STEPS) == plain_training(values, tmp_path / "plain")
