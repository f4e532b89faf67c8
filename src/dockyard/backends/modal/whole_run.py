"""A whole run on a machine that may be taken away: `dockyard train` in a folder that lasts, resumed if it is there."""

import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from dockyard.config import RunConfig
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
    config = resumed_config(folder, []) if begun else load_run_config(None, list(words))
    which = [f"--resume={folder}"] if begun else [*words, f"--run_dir={folder}"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _way_back(config, forward) as way:
        code = subprocess.run([*_COMMAND, *which, *way], check=False).returncode
    if code < 0:
        raise RuntimeError(f"training was ended by signal {-code}")
    return code


@contextmanager
def _way_back(config: RunConfig, forward: Forward) -> Generator[list[str]]:
    """Settings by which agents in other sandboxes reach the gateway."""
    if config.environment.type in LOCAL or not runs_inside(config.agent):
        yield []
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with forward(port) as tunnel:
        yield [f"--gateway.port={port}", f"--gateway.public_url={tunnel.url}"]
