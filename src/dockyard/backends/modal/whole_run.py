"""A whole run on a machine that may be taken away: `dockyard train` in a folder that lasts, resumed if it is there."""

import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from dockyard.errors import DockyardError
from dockyard.rollout.agents import runs_inside
from dockyard.rollout.environments import LOCAL
from dockyard.run_dir import resumed_config, settings_file
from dockyard.settings import load_run_config

_COMMAND = (sys.executable, "-c", "import sys; from dockyard.cli import main; sys.exit(main())", "train")


class Tunnel(Protocol):
    """A port of this machine as the world sees it."""

    @property
    def url(self) -> str: ...


type Forward = Callable[[int], AbstractContextManager[Tunnel]]


def train_in(folder: Path, words: Sequence[str], forward: Forward) -> int:
    """Train with these settings in this folder; the exit code. A process that was killed raises: Modal tries again."""
    begun = settings_file(folder).is_file() or not words
    which = [f"--resume={folder}"] if begun else [*words, f"--run_dir={folder}"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _way_back(_calls_from_afar(folder, begun, words), forward) as way:
        code = subprocess.run([*_COMMAND, *which, *way], check=False).returncode
    if code < 0:
        raise RuntimeError(f"training was ended by signal {-code}")
    return code


def _calls_from_afar(folder: Path, begun: bool, words: Sequence[str]) -> bool:
    """Whether agents will call the gateway from other sandboxes."""
    try:
        config = resumed_config(folder, []) if begun else load_run_config(None, [word for word in words if "=" in word])
    except DockyardError:  # which the command is about to say itself
        return False
    return config.environment.type not in LOCAL and runs_inside(config.agent)


@contextmanager
def _way_back(needed: bool, forward: Forward) -> Generator[list[str]]:
    """Settings by which agents reach the gateway from there."""
    if not needed:
        yield []
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with forward(port) as tunnel:
        yield [f"--gateway.port={port}", f"--gateway.public_url={tunnel.url}"]
