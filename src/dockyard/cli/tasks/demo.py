"""`dockyard tasks demo`: the demo's tasks as folders, to look at or change."""

import argparse
from pathlib import Path

from dockyard.cli.run_file import AddParser
from dockyard.cli.tasks.generated import add_folder, write_both


def add(add_parser: AddParser) -> None:
    """Describe the source."""
    add_folder(add_parser("demo", help="small shell tasks", description="Write the demo's tasks to a folder."))


def act(arguments: argparse.Namespace) -> int:
    """Write the demo's tasks."""
    from dockyard.tasks.generated import write_demo_tasks

    folder: Path = arguments.folder
    return write_both(folder, write_demo_tasks)
