"""`dockyard tasks swebench`."""

import argparse
from pathlib import Path

from dockyard.cli.rollout import positive
from dockyard.cli.run_file import AddParser
from dockyard.cli.terminal import say
from dockyard.tasks.swebench.columns import DEFAULT_DATASET


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
    parser.add_argument("--repo", action="append", default=[], help="only this repository, as owner/name; repeatable")
    parser.add_argument("--id", action="append", default=[], help="only this instance; repeatable")
    parser.add_argument("--limit", metavar="N", type=positive, help="write at most N tasks")
    parser.add_argument("--seed", type=int, help="of the order in which the limit takes them")
    parser.add_argument("--map", action="append", default=[], metavar="OURS=THEIRS", help="what a column is called")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def act(arguments: argparse.Namespace) -> int:
    """Write the tasks. 1 when there are none."""
    from dockyard.tasks.columns import parse_mapping
    from dockyard.tasks.select import Selection
    from dockyard.tasks.swebench import write_swebench_tasks

    written = write_swebench_tasks(
        arguments.folder,
        dataset=arguments.dataset,
        split=arguments.split,
        selection=Selection(
            repos=tuple(arguments.repo), ids=tuple(arguments.id), limit=arguments.limit, seed=arguments.seed
        ),
        mapping=parse_mapping(arguments.map),
    )
    say(written.table())
    return 0 if written.names else 1
