"""`dockyard doctor`."""

import argparse

from dockyard.cli.run_file import AddParser


def add(add_parser: AddParser) -> None:
    """Describe the verb."""
    parser = add_parser(
        "doctor",
        help="what this machine can run, or how a model is prompted",
        description="What this machine can run; with MODEL, how that model's prompts are built and which agents fit.",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a model folder, a Hub name, or `smollm2-135m`")
    parser.add_argument("--json", action="store_true", help="print the report as data")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def act(arguments: argparse.Namespace) -> int:
    """Examine the machine, or a model."""
    from dockyard.doctor import main as doctor_main

    about = [arguments.model] if arguments.model is not None else []
    return doctor_main([*about, *(["--json"] if arguments.json else [])])
