"""Output and errors: data goes to stdout, everything else to stderr."""

import argparse
import logging
import os
import sys
import traceback
from typing import NoReturn

from dockyard.errors import DockyardError, UsageError

EXIT_STOPPED = 130


class Parser(argparse.ArgumentParser):
    """Raises our errors instead of printing argparse's usage text."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"`{self.prog} --help` shows the usage")


def print_data(text: str) -> None:
    """Write to stdout. The reader may have closed it (`| head`)."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{text}\n")


def show(error: DockyardError, *, debug: bool) -> None:
    """Print an error and its hint to stderr."""
    from rich.console import Console
    from rich.text import Text

    from dockyard.settings.messages import SettingProblem, SettingsError  # slow to import

    if debug:
        traceback.print_exc()
    console = Console(stderr=True, highlight=False)
    problems = error.problems if isinstance(error, SettingsError) else (SettingProblem(error.message, error.hint),)
    for problem in problems:
        console.print(Text.assemble(("error", "red"), f": {problem.message}"), soft_wrap=True)
        console.print(Text.assemble(("hint", "cyan"), f": {problem.hint}"), soft_wrap=True)


def configure_logging(*, debug: bool) -> None:
    """Show our own log lines, and only serious ones of other packages."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s" if debug else "%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("dockyard").setLevel(logging.DEBUG if debug else logging.INFO)
    if not debug:
        for handler in logging.getLogger().handlers:
            handler.addFilter(_is_worth_showing)


def _is_worth_showing(record: logging.LogRecord) -> bool:
    """A failed trial is recorded on its rollout, so Harbor's log line about it is left out."""
    return not record.name.startswith("harbor") or record.levelno >= logging.CRITICAL
