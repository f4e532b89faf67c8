"""The Docker engine for tests: the one that answers, or the one that tools/install-docker.sh made."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

SETTINGS = Path(__file__).parents[2] / ".cache" / "docker" / "env"
BASE = "dockyard/base:1"
PATIENCE_S = 600  # only against hanging
AGENTS_IMAGE = "dockyard/agents:test"
"""With the programs of real agents."""


def use_engine() -> None:
    """Lead this process to the engine. Without one the tests fail: they are asked for by name."""
    if SETTINGS.exists():
        for word in shlex.split(SETTINGS.read_text()):
            name, is_set, value = word.partition("=")
            os.environ.update({name: value} if is_set else {})
    done = subprocess.run(["docker", "image", "inspect", BASE], capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        pytest.fail(f"no Docker engine with `{BASE}` answers: {done.stderr.strip()}\nrun `sh tools/install-docker.sh`")


def need_image(image: str) -> None:
    """Without it the tests fail: they are asked for by name."""
    found = subprocess.run(["docker", "image", "inspect", image], capture_output=True, text=True, timeout=PATIENCE_S)
    if found.returncode:
        pytest.fail(f"no image `{image}`: {found.stderr.strip()}\nrun `sh tools/build-agent-image.sh`")


def docker(*args: str) -> str:
    done = subprocess.run(["docker", *args], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
