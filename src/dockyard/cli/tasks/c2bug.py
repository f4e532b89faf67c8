"""`dockyard tasks c2bug`."""

import argparse
from pathlib import Path

from dockyard.cli.run_file import AddParser
from dockyard.cli.tasks.row_options import add_row_options, closed, mapping_of, selection_of

_ABOUT = "Turn a dataset of bugs in git repositories into Harbor tasks. docs/guides/tasks.md lists its columns."


def add(add_parser: AddParser) -> None:
    """Describe the source."""
    parser = add_parser("c2bug", help="bugs put into git repositories", description=_ABOUT)
    parser.add_argument("folder", metavar="OUT", type=Path, help="gets a folder per task")
    parser.add_argument("--dataset", metavar="NAME", help="a .jsonl, .json or .parquet file, a folder, or a Hub name")
    parser.add_argument("--split", metavar="NAME", help="only the files of this split")
    parser.add_argument("--repositories", metavar="DIR", type=Path, help="local checkouts or bundles")
    parser.add_argument(
        "--template",
        metavar="DIR",
        type=Path,
        help="four files instead of ours: Dockerfile, instruction.md, task.toml, test.sh",
    )
    parser.add_argument("--image", metavar="IMAGE", help="the image that every task starts from")
    add_row_options(parser)


def act(arguments: argparse.Namespace) -> int:
    """Write the tasks, and say what became of each row that is none."""
    from dockyard.tasks.c2bug import DEFAULT_DATASET, write_c2bug_tasks

    written = write_c2bug_tasks(
        arguments.folder,
        dataset=arguments.dataset or DEFAULT_DATASET,
        split=arguments.split,
        selection=selection_of(arguments),
        mapping=mapping_of(arguments),
        repositories=arguments.repositories,
        template=arguments.template,
        image=arguments.image,
    )
    return closed(written)
