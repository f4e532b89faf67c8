"""What the sources of generated tasks have in common on the command line."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dockyard.cli.terminal import say
from dockyard.errors import UsageError

if TYPE_CHECKING:
    from dockyard.tasks.generated import WriteTasks


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Describe where the tasks go."""
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def write_both(folder: Path, write: "WriteTasks") -> int:
    """Write both halves to a folder that has neither."""
    for name in ("train", "heldout"):
        if (folder / name).exists():
            raise UsageError(f"`{folder / name}` is already there", hint="choose another folder, or remove it first")
    write(folder)
    say(f"wrote {folder / 'train'} and {folder / 'heldout'}")
    return 0
