"""`dockyard backend`: what is refused, what is dropped, what is written, and what a resumed run keeps."""

import json
import logging
import select
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dockyard import supervise
from dockyard.backends.launch import Backend, BackendLaunch, Supported, clear_away, read_task_list, start
from dockyard.backends.prime_rl.launch import BACKEND as PRIME_RL
from dockyard.backends.slime.launch import BACKEND as SLIME
from dockyard.cli import main
from dockyard.config import RunConfig
from dockyard.errors import DockyardError
from dockyard.settings.text import settings_by_key

MINE = ["--model.name", "Qwen/Qwen3-8B", "--tasks.source", "demo", "--slime.checkout", "slime", "--run_dir", "mine"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    yield
    logging.getLogger("dockyard").setLevel(logging.NOTSET)


def is_own(key: str) -> bool:
    return key.startswith(("slime.", "prime_rl."))


@pytest.mark.parametrize("backend", [SLIME, PRIME_RL], ids=lambda backend: backend.name)
def test_every_setting_is_supported_or_ignored_for_a_reason(backend: Backend):
    found = {key: backend.support(key, RunConfig()) for key in settings_by_key(RunConfig) if not is_own(key)}
    assert all(support.by if isinstance(support, Supported) else support.why for support in found.values())
    with pytest.raises(KeyError):
        backend.support("grpo.new_setting", RunConfig())


@pytest.mark.parametrize("backend", ["slime", "prime-rl"])
def test_settings_that_the_backend_would_ignore_are_refused_together_with_their_place(
    tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
):
    Path("run.toml").write_text('[model]\ndevice = "cuda"\n[tasks]\nsource = "demo"\n[engine]\ntype = "transformers"\n')
    assert main(["backend", backend, "run.toml", "--model.device", "cpu", "--dry-run"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    hint = "hint: remove it, or add `--drop model.device,engine.type`"
    assert errors[0].startswith(f'error: {backend} ignores `model.device`, which is `"cpu"` on the command line: ')
    assert errors[1].startswith(f'error: {backend} ignores `engine.type`, which is `"transformers"` in `run.toml`: ')
    assert len(errors) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["run.toml"]
    assert main(["backend", backend, "run.toml", "--model.device", "cpu", "--dry-run"]) == 2
    assert hint in capsys.readouterr().err.splitlines()


def test_a_setting_that_was_not_written_is_never_refused():
    assert main(["backend", "slime", "--dry-run", *MINE]) == 0


def test_dropped_settings_are_as_if_they_had_not_been_written(capsys: pytest.CaptureFixture[str]):
    Path("run.toml").write_text("[trainer]\nlora_r = 4\nlr = 3e-6\n")
    assert main(["backend", "slime", "run.toml", "--write", "--drop", "trainer.lora_r", *MINE]) == 0
    settings = tomllib.loads(Path("mine/config.toml").read_text())["trainer"]
    assert (settings["lora_r"], settings["lr"]) == (16, 3e-6)
    assert "--lr 3e-06" in Path("mine/backend/train.sh").read_text()


@pytest.mark.parametrize(
    ("drop", "error"),
    [
        ("trainer.lora", "`trainer.lora` in `--drop` is not a setting"),
        ("trainer.lora_r", "`trainer.lora_r` in `--drop` is not set in the file or on the command line"),
    ],
)
def test_only_what_was_written_can_be_dropped(drop: str, error: str, capsys: pytest.CaptureFixture[str]):
    assert main(["backend", "slime", "--dry-run", "--drop", drop, *MINE]) == 2
    assert f"error: {error}" in capsys.readouterr().err.splitlines()


def test_one_run_file_may_have_sections_of_several_backends():
    Path("run.toml").write_text('[prime_rl]\ncheckout = "prime-rl"\n[slime]\nnum_gpus = 16\n')
    assert main(["backend", "slime", "run.toml", "--dry-run", *MINE]) == 0
    assert main(["train", "run.toml", "--dry-run", "--tasks.source=demo"]) == 0


def test_a_dry_run_prints_the_files_and_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["backend", "slime", "--dry-run", *MINE]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("# train.sh\n#!/usr/bin/env bash\n")
    assert "on 8 GPUs" in shown.err
    assert main(["backend", "slime", "--dry-run", "--json", *MINE]) == 0
    parts = json.loads(capsys.readouterr().out)
    assert parts["settings"]["model"]["name"] == "Qwen/Qwen3-8B"
    assert parts["command"] == ["bash", str(tmp_path / "mine/backend/train.sh")]
    assert list(tmp_path.iterdir()) == []


def test_written_files_are_complete_and_nothing_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["backend", "slime", "--write", *MINE]) == 0
    assert "`dockyard backend slime --resume mine` starts it" in capsys.readouterr().err
    assert {file.name for file in Path("mine/backend").iterdir()} == {"train.sh", "dockyard.yaml"}
    assert Path("mine/backend/dockyard.yaml").read_text() == f'dockyard_run: "{tmp_path / "mine"}"\n'
    tasks = read_task_list(Path("mine"))
    assert (len(tasks.train), len(tasks.heldout)) == (64, 32)
    assert all(task.path.is_absolute() for task in tasks.train)


def test_a_run_belongs_to_the_backend_that_began_it(capsys: pytest.CaptureFixture[str]):
    main(["backend", "slime", "--write", *MINE])
    assert main(["train", "--resume", "mine"]) == 2
    assert "hint: `dockyard backend slime --resume mine` continues it" in capsys.readouterr().err
    assert main(["backend", "slime", "--write", *MINE]) == 2
    assert "error: `mine` already holds a run" in capsys.readouterr().err
    assert main(["backend", "slime", "--resume", "mine", "--drop", "seed"]) == 2
    assert "error: `--drop` cannot be combined with `--resume`" in capsys.readouterr().err


def test_a_resumed_run_keeps_its_tasks_and_may_have_more_steps_and_other_gpus():
    main(["tasks", "demo", "tasks"])
    words = ["--tasks.source", "folder", "--tasks.train", "tasks/train", "--write", "--drop", "tasks.source"]
    main(["backend", "slime", *MINE[:2], *words, "--slime.checkout", "slime", "--run_dir", "mine"])
    before = read_task_list(Path("mine"))
    assert len(before.train) == 64
    for extra in list(Path("tasks/train").iterdir())[:4]:
        shutil.copytree(extra, extra.with_name(f"{extra.name}-again"))
    assert main(["backend", "slime", "--resume", "mine", "--write", "--steps", "77", "--slime.num_gpus", "4"]) == 0
    script = Path("mine/backend/train.sh").read_text()
    assert "--num-rollout 77" in script
    assert "--actor-num-gpus-per-node 4" in script
    assert read_task_list(Path("mine")) == before
    assert main(["backend", "slime", "--resume", "mine", "--write", "--trainer.lr", "1"]) == 2


def test_overwriting_a_run_removes_what_the_backend_left(tmp_path: Path):
    main(["backend", "slime", "--write", *MINE])
    stale = tmp_path / "mine/backend/checkpoints/latest_checkpointed_iteration.txt"
    stale.parent.mkdir()
    stale.touch()
    assert main(["backend", "slime", "--write", "--overwrite", *MINE]) == 0
    assert not stale.exists()


def test_passes_become_steps(capsys: pytest.CaptureFixture[str]):
    words = ["--tasks.num_train", "20", "--tasks.passes", "3"]
    assert main(["backend", "slime", "--write", *MINE, *words]) == 0
    assert "--num-rollout 9" in Path("mine/backend/train.sh").read_text()  # 3 passes of 8 + 8 + 4 tasks


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(DockyardError, match="`no-such-program` is not installed"):
        start(BackendLaunch(command=("no-such-program",)))


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_a_command_gets_its_environment_and_folder_and_gives_its_code(tmp_path: Path, ending: str, code: int):
    script = f"import os, sys; open('here', 'w').write(os.environ['MINE']); {ending}"
    command = (sys.executable, "-c", script)
    assert start(BackendLaunch(command=command, environment={"MINE": "yes"}, directory=tmp_path)) == code
    assert (tmp_path / "here").read_text() == "yes"


def test_containers_that_killed_processes_left_are_removed_where_docker_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    clear_away("sandbox")
    assert not (tmp_path / "asked").exists()
    clear_away("docker")
    assert "label=dockyard.owner" in (tmp_path / "asked").read_text()
    docker.write_text("#!/bin/sh\necho Cannot connect to the Docker daemon >&2\nexit 1\n")
    clear_away("docker")  # which the next run makes up for


def guarded(script: str, patience_s: float = 60.0) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-I", supervise.__file__, str(patience_s), "sh", "-c", script]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    return process


def test_what_a_command_leaves_running_ends_with_it():
    with guarded("sleep 600 & echo ready; exit 5") as process:
        assert process.wait(60) == 5
        assert process.stdout
        assert select.select([process.stdout], [], [], 60)[0]
        assert process.stdout.read() == b""  # nobody is left to write


def test_a_command_that_does_not_stop_when_it_is_asked_to_is_killed_with_all_it_started():
    with guarded("trap '' TERM; sleep 600 & echo ready; wait; sleep 600", patience_s=0.1) as process:
        assert process.stdin
        process.stdin.close()
        assert process.wait(60) == 137


def test_a_command_is_asked_to_stop_before_it_is_killed():
    with guarded("trap 'exit 7' TERM; echo ready; while :; do sleep 1; done") as process:
        assert process.stdin
        process.stdin.close()
        assert process.wait(60) == 7
