"""`dockyard tasks c2bug`."""

import argparse
from pathlib import Path

from dockyard.cli.rollout import positive
from dockyard.cli.run_file import AddParser
from dockyard.cli.terminal import say

_ABOUT = "Turn a dataset of bugs in git repositories into Harbor tasks. docs/guides/tasks.md lists its columns."


def add(add_parser: AddParser) -> None:
    """Describe the source."""
    parser = add_parser("c2bug", help="bugs put into git repositories", description=_ABOUT)
    parser.add_argument("folder", metavar="OUT", type=Path, help="gets a folder per task")
    parser.add_argument("--dataset", metavar="NAME", help="a .jsonl, .json or .parquet file, a folder, or a Hub name")
    parser.add_argument("--split", metavar="NAME", help="only the files of this split")
    parser.add_argument("--repo", metavar="OWNER/NAME", action="append", default=[], help="only of this repository")
    parser.add_argument("--id", metavar="ID", action="append", default=[], help="only this instance")
    parser.add_argument("--limit", metavar="N", type=positive, help="write at most N tasks")
    parser.add_argument("--seed", metavar="N", type=int, help="take them in an order of this seed's")
    parser.add_argument("--map", metavar="OURS=THEIRS", action="append", default=[], help="which column is which")
    parser.add_argument("--repositories", metavar="DIR", type=Path, help="local checkouts or bundles")
    parser.add_argument(
        "--template",
        metavar="DIR",
        type=Path,
        help="four files instead of ours: Dockerfile, instruction.md, task.toml, test.sh",
    )
    parser.add_argument("--image", metavar="IMAGE", help="the image that every task starts from")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def act(arguments: argparse.Namespace) -> int:
    """Write the tasks, and say what became of each row that is none."""
    from dockyard.tasks.c2bug import DEFAULT_DATASET, write_c2bug_tasks
    from dockyard.tasks.columns import parse_mapping
    from dockyard.tasks.select import Selection

    selection = Selection(
        repos=tuple(arguments.repo), ids=tuple(arguments.id), limit=arguments.limit, seed=arguments.seed
    )
    written = write_c2bug_tasks(
        arguments.folder,
        dataset=arguments.dataset or DEFAULT_DATASET,
        split=arguments.split,
        selection=selection,
        mapping=parse_mapping(arguments.map),
        repositories=arguments.repositories,
        template=arguments.template,
        image=arguments.image,
    )
    say(written.table())
    return 0 if written.names else 1
