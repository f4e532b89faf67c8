"""`dockyard tasks demo`."""

import argparse
from pathlib import Path

from dockyard.cli.run_file import AddParser
from dockyard.cli.terminal import say
from dockyard.errors import UsageError


def add(add_parser: AddParser) -> None:
    """Describe the source."""
    parser = add_parser("demo", help="small shell tasks", description="Write the demo's tasks to a folder.")
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def act(arguments: argparse.Namespace) -> int:
    """Write the demo's tasks."""
    from dockyard.tasks.demo import write_demo_tasks

    folder: Path = arguments.folder
    for name in ("train", "heldout"):
        if (folder / name).exists():
            raise UsageError(f"`{folder / name}` is already there", hint="choose another folder, or remove it first")
    write_demo_tasks(folder)
    say(f"wrote {folder / 'train'} and {folder / 'heldout'}")
    return 0
