"""`dockyard backend prime-rl` and `python -m src.train` start `rl` as real processes; a script stands in for it."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RL = f"""#!{sys.executable}
import json, os, pathlib, shutil, sys
here = pathlib.Path(__file__).parent
told = {{"words": sys.argv[1:], "folder": os.getcwd(), "others": shutil.which("env-server")}}
(here / "told.json").write_text(json.dumps(told))
sys.exit(int((here / "code").read_text()))
"""
DOCKYARD = ("-c", "import sys; from dockyard.cli import main; sys.exit(main())", "backend", "prime-rl")
TASKS = ROOT / "datasets" / "harbor_tasks"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of Prime-RL with its environment, as far as the launch sees it."""
    programs = tmp_path / "prime-rl" / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in {"rl": RL, "python": "#!/bin/sh\n", "env-server": "#!/bin/sh\n", "code": "0"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return tmp_path / "prime-rl"


def run(*words: str | Path, checkout: Path | None = None, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """With a PATH that has the checkout's programs, or no `rl` at all."""
    programs = checkout / ".venv" / "bin" if checkout else "/nowhere"
    command = [sys.executable, *map(str, words)]
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)


def told(checkout: Path) -> dict[str, Any]:
    return json.loads((checkout / ".venv" / "bin" / "told.json").read_text())


@pytest.mark.parametrize("name", ["harbor_8b", "harbor_8b_modal"])
def test_a_file_that_ships_is_handed_to_rl_as_it_is(name: str, checkout: Path):
    done = run("-m", "src.train", "--config", f"configs/{name}.toml", "--max-steps", "2", checkout=checkout)
    assert done.returncode == 0, done.stderr
    assert told(checkout)["words"] == ["@", f"configs/{name}.toml", "--max-steps", "2"]
    assert told(checkout)["folder"] == str(ROOT)


def test_an_old_file_is_translated_with_a_message_and_handed_to_rl(tmp_path: Path, checkout: Path):
    old = tmp_path / "old.toml"
    old.write_text((ROOT / "tests" / "data" / "prime_rl_old.toml").read_text())
    done = run("-m", "src.train", "--config", old, checkout=checkout)
    assert done.returncode == 0, done.stderr
    assert "`[[orchestrator.env]]` is now `[[orchestrator.train.source]]`" in done.stderr
    assert told(checkout)["words"] == ["@", str(tmp_path / "old.translated.toml")]


def test_a_run_file_becomes_a_run_that_goes_on_from_its_checkpoint(tmp_path: Path, checkout: Path):
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(
        f'run_dir = "{folder}"\n[model]\nname = "Qwen/Qwen3-8B"\n[tasks]\ntrain = "{TASKS}"\npasses = 4\n'
        f'[prime_rl]\ncheckout = "{checkout}"\n'
    )
    (checkout / ".venv" / "bin" / "code").write_text("7")
    done = run("-m", "src.train", "--config", file)
    assert done.returncode == 1
    assert "prime-rl ended with code 7" in done.stderr
    assert told(checkout)["words"] == ["@", str(folder / "backend" / "rl.toml")]
    assert told(checkout)["others"] == str(checkout / ".venv" / "bin" / "env-server")
    first = tomllib.loads((folder / "backend" / "rl.toml").read_text())
    assert first["max_steps"] == 4
    tasks = json.loads((folder / "task-list.json").read_text())
    assert sorted(task["name"] for task in tasks["train"]) == sorted(path.name for path in TASKS.iterdir())

    (folder / "backend" / "prime-rl" / "checkpoints" / "step_2").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "code").write_text("0")
    again = run(*DOCKYARD, "--resume", folder)
    assert again.returncode == 0, again.stderr
    assert tomllib.loads((folder / "backend" / "rl.toml").read_text()) == first | {"resume": {}}


def test_settings_that_prime_rl_would_ignore_are_refused_and_may_be_dropped(tmp_path: Path, checkout: Path):
    words = (*DOCKYARD, "--model.name=Qwen/Qwen3-8B", f"--tasks.train={TASKS}")
    ignored = (f"--run_dir={tmp_path / 'run'}", "--grpo.clip_high=0.3", f"--prime_rl.checkout={checkout}")
    refused = run(*words, *ignored)
    assert refused.returncode == 2
    assert "prime-rl ignores `grpo.clip_high`, which is `0.3` on the command line" in refused.stderr
    assert not (tmp_path / "run").exists()
    done = run(*words, *ignored, "--drop", "grpo.clip_high")
    assert done.returncode == 0, done.stderr


def test_without_prime_rl_the_error_says_where_it_was_looked_for(tmp_path: Path):
    done = run(*DOCKYARD, "--model.name=Qwen/Qwen3-8B", f"--tasks.train={TASKS}", folder=tmp_path)
    assert done.returncode == 1
    assert "Prime-RL is not installed: there is no `rl` on the PATH" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_options_of_runs_do_not_go_with_a_file_of_prime_rls(checkout: Path):
    done = run("-m", "src.train", "--config", "configs/harbor_8b.toml", "--overwrite", checkout=checkout)
    assert done.returncode == 2
    assert "`--overwrite` cannot be combined with `configs/harbor_8b.toml`, which is a Prime-RL file" in done.stderr
