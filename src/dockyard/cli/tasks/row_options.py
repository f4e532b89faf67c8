"""What `dockyard tasks` asks of every dataset of rows: which of them, and what their columns are called."""

import argparse
from typing import TYPE_CHECKING

from dockyard.cli.rollout import positive
from dockyard.cli.terminal import say

if TYPE_CHECKING:
    from dockyard.tasks.folder import WrittenTasks
    from dockyard.tasks.split import Selection


def add_row_options(parser: argparse.ArgumentParser) -> None:
    """Besides the folder and the dataset."""
    parser.add_argument("--repo", metavar="OWNER/NAME", action="append", default=[], help="only of this repository")
    parser.add_argument("--id", metavar="ID", action="append", default=[], help="only this instance")
    parser.add_argument("--limit", metavar="N", type=positive, help="write at most N tasks")
    parser.add_argument("--seed", metavar="N", type=int, help="take them in an order of this seed's")
    parser.add_argument("--map", metavar="OURS=THEIRS", action="append", default=[], help="which column is which")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def selection_of(arguments: argparse.Namespace) -> "Selection":
    """Which rows are asked for."""
    from dockyard.tasks.split import Selection

    return Selection(repos=tuple(arguments.repo), ids=tuple(arguments.id), limit=arguments.limit, seed=arguments.seed)


def mapping_of(arguments: argparse.Namespace) -> dict[str, str]:
    """What the dataset calls our columns."""
    from dockyard.tasks.rows import parse_mapping

    return parse_mapping(arguments.map)


def closed(written: "WrittenTasks") -> int:
    """Say what became of each row that is no task; 1 when none is."""
    say(written.table())
    return 0 if written.names else 1
