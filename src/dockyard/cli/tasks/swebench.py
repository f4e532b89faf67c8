"""`dockyard tasks swebench`."""

import argparse
from pathlib import Path

from dockyard.cli.run_file import AddParser
from dockyard.cli.tasks.row_options import add_row_options, closed, mapping_of, selection_of
from dockyard.tasks.swebench.instance import DEFAULT_DATASET


def add(add_parser: AddParser) -> None:
    """Describe the source."""
    parser = add_parser(
        "swebench",
        help="issues of SWE-bench, on its public images",
        description="Turn rows of SWE-bench into task folders that are graded by SWE-bench's own harness.",
    )
    parser.add_argument("folder", metavar="OUT", type=Path)
    parser.add_argument(
        "--dataset",
        default=DEFAULT_DATASET,
        help=f"a .jsonl, .json or .parquet file, or a name on the Hub ({DEFAULT_DATASET})",
    )
    parser.add_argument("--split", help="of a dataset on the Hub (test)")
    add_row_options(parser)


def act(arguments: argparse.Namespace) -> int:
    """Write the tasks. 1 when there are none."""
    from dockyard.tasks.swebench import write_swebench_tasks

    written = write_swebench_tasks(
        arguments.folder,
        dataset=arguments.dataset,
        split=arguments.split,
        selection=selection_of(arguments),
        mapping=mapping_of(arguments),
    )
    return closed(written)
