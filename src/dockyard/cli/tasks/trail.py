"""`dockyard tasks trail`: tasks of three or four model calls as folders, to look at or change."""

import argparse
from pathlib import Path

from dockyard.cli.run_file import AddParser
from dockyard.cli.tasks.generated import add_folder, write_both


def add(add_parser: AddParser) -> None:
    """Describe the source."""
    describe = "Write tasks in which each note names the next to a folder."
    add_folder(add_parser("trail", help="shell tasks of several turns", description=describe))


def act(arguments: argparse.Namespace) -> int:
    """Write the tasks."""
    from dockyard.tasks.generated import write_trail_tasks

    folder: Path = arguments.folder
    return write_both(folder, write_trail_tasks)
