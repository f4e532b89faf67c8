"""The command line. `main(argv)` runs one command and returns its exit code."""

from dockyard.cli.main import main

__all__ = ["main"]
