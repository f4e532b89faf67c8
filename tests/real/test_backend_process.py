"""`dockyard backend slime` with real processes: a stand-in of SLiME's checkout is started, stopped and killed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import write_model

from dockyard.backends.slime.layout import MODELS

PATIENCE_S = 1200  # only against hanging
TRAIN = """
import json, os, signal, subprocess, sys
names = ("PYTHONPATH", "RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "CUDA_DEVICE_MAX_CONNECTIONS")
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps({"words": sys.argv[1:], "env": {name: os.environ[name] for name in names}}) + "\\n")
if os.environ.get("WAIT"):
    child = subprocess.Popen(["sleep", "600"])
    def stop(*_):
        print("told to stop", flush=True)
        child.kill()
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    print("training", flush=True)
    child.wait()
sys.exit(int(os.environ.get("CODE", "0")))
"""
CONVERT = """
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--save") + 1])
folder.mkdir()
(folder / "latest_checkpointed_iteration.txt").write_text("release")
print("conversion done", flush=True)
"""


@dataclass(frozen=True, slots=True)
class Bench:
    """A folder with what a launch needs."""

    folder: Path

    def environment(self, **more: str) -> dict[str, str]:
        return os.environ | {"RECORD": str(self.folder / "record"), **more}

    def launch(self, *words: str, **more: str) -> subprocess.Popen[str]:
        script = "import sys; from dockyard.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", script, "backend", "slime", *words]
        pipe = subprocess.PIPE
        environment = self.environment(**more)
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "record").read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    files = {
        "slime/train.py": TRAIN,
        "slime/tools/convert_hf_to_torch_dist.py": CONVERT,
        "slime/slime/utils/arguments.py": "",
        "slime/torch/__init__.py": "class cuda:\n    device_count = staticmethod(lambda: 8)\n",
        "slime/ray/__init__.py": "",
        "slime/sglang/__init__.py": "",
        "megatron/megatron/__init__.py": "",
        "model/config.json": json.dumps(MODELS["Qwen/Qwen2.5-Coder-7B-Instruct"]),
        "run.toml": f"""
            run_dir = "mine"
            model.name = "model"
            tasks = {{ source = "demo", num_train = 8, num_heldout = 4 }}
            [slime]
            checkout = "slime"
            megatron = "megatron"
            converted = "converted"
            python = "{sys.executable}"
        """,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    write_model(tmp_path / "model")
    return Bench(tmp_path)


def until(process: subprocess.Popen[str], words: str) -> None:
    """Read what the process says up to these words."""
    assert process.stderr
    heard = list[str]()
    for line in process.stderr:
        heard.append(line)
        if words in line:
            return
    raise AssertionError(f"`{words}` was never said: {''.join(heard)}")


def ended(process: subprocess.Popen[str]) -> str:
    """What it said to its end, which is that of all processes that hold its pipes."""
    _, said = process.communicate(timeout=PATIENCE_S)
    return said


@pytest.fixture
def training(bench: Bench) -> Iterator[subprocess.Popen[str]]:
    process = bench.launch("run.toml", WAIT="1")
    try:
        until(process, "training")
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def test_a_run_is_converted_once_started_with_all_its_arguments_and_started_again_by_resume_or_by_hand(bench: Bench):
    first = bench.launch("run.toml", CODE="3")
    said = ended(first)
    assert first.returncode == 1
    assert "conversion done\n" in said
    assert "slime ended with code 3; `dockyard backend slime --resume mine` continues" in said
    second = bench.launch("--resume", "mine")
    said = ended(second)
    assert (second.returncode, "conversion done" in said) == (0, False)
    by_hand = subprocess.run(
        ["bash", "mine/backend/train.sh"], cwd=bench.folder, env=bench.environment(), timeout=PATIENCE_S
    )
    assert by_hand.returncode == 0

    records = bench.records()
    assert records[0] == records[1] == records[2]
    words, environment = records[0]["words"], records[0]["env"]
    place = bench.folder
    assert words[words.index("--hf-checkpoint") + 1] == str(place / "model")
    assert words[words.index("--ref-load") + 1] == str(place / "converted")
    assert words[words.index("--custom-config-path") + 1] == str(place / "mine/backend/dockyard.yaml")
    assert environment["PYTHONPATH"].split(":")[:2] == [str(place / "slime"), str(place / "megatron")]
    handed_on = json.loads(environment["RAY_JOB_CONFIG_JSON_ENV_VAR"])["runtime_env"]["env_vars"]
    assert handed_on["PYTHONPATH"] == environment["PYTHONPATH"]


def test_a_signal_stops_the_command_and_the_run_can_be_continued(training: subprocess.Popen[str]):
    training.terminate()
    said = ended(training)
    assert training.returncode == 130
    assert said == "told to stop\nstopped; `dockyard backend slime --resume mine` continues\n"


def test_while_a_run_is_held_nobody_else_starts_it_and_its_command_ends_when_the_launcher_is_killed(
    bench: Bench, training: subprocess.Popen[str]
):
    other = bench.launch("--resume", "mine")
    assert f"is in use by process {training.pid}" in ended(other)
    assert other.returncode == 1
    script = ["bash", "mine/backend/train.sh"]
    by_hand = subprocess.run(
        script, cwd=bench.folder, env=bench.environment(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert by_hand.returncode == 1
    assert by_hand.stderr == f"error: another process holds {bench.folder / 'mine'}\n"
    training.kill()
    assert ended(training) == "told to stop\n"  # and its child, which holds the same pipe, is gone
    assert len(bench.records()) == 1
