"""`dockyard tasks`: a file per source of tasks."""

import argparse

from dockyard.cli.run_file import AddParser
from dockyard.cli.tasks import c2bug, check, demo, swebench, trail

_SOURCES = {"c2bug": c2bug, "check": check, "demo": demo, "swebench": swebench, "trail": trail}


def add(add_parser: AddParser) -> None:
    """Describe the verb."""
    parser = add_parser("tasks", help="make and check task folders", description="Make task folders, and check them.")
    sources = parser.add_subparsers(dest="source", metavar="SOURCE", required=True)
    for source in _SOURCES.values():
        source.add(sources.add_parser)


def act(arguments: argparse.Namespace) -> int:
    """Make or check tasks."""
    return _SOURCES[arguments.source].act(arguments)
