"""`dockyard serve`."""

import argparse
from collections.abc import Sequence

from dockyard.cli.run_file import AddParser
from dockyard.cli.terminal import say
from dockyard.process import stopped_by_signals
from dockyard.serve.options import ServeOptions, add_serve, as_flag


def as_flags(words: Sequence[str]) -> list[str]:
    """Settings as a RUN.toml names them, written as this verb's own options."""
    return [as_flag(word) for word in words]


def add(add_parser: AddParser) -> None:
    """Describe the verb."""
    add_serve(add_parser).add_argument("--debug", action="store_true", help="show tracebacks")


def act(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes, which raises KeyboardInterrupt."""
    options = ServeOptions.of(arguments)
    from dockyard.serve.server import serve

    with stopped_by_signals():
        serve(options, say)
    return 0
