"""`dockyard agents`."""

import argparse

from dockyard.cli.run_file import AddParser
from dockyard.cli.terminal import print_data


def add(add_parser: AddParser) -> None:
    """Describe the verb."""
    parser = add_parser(
        "agents",
        help="every agent: its dialect, how it is wired, what was validated",
        description="Every Harbor agent and ours: its dialect, how it is wired to the gateway, what was validated.",
    )
    parser.add_argument("--json", action="store_true", help="print the table as data")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def act(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from dockyard.rollout.agents.rows import list_agents

    print_data(list_agents(as_json=arguments.json).rstrip("\n") + "\n")
    return 0
