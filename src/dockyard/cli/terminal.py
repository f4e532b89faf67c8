"""What a person and a pipe get to see: data on stdout, everything else on stderr."""

import logging
import os
import sys
import traceback

from dockyard.errors import DockyardError
from dockyard.settings.messages import SettingProblem, SettingsError


def print_data(text: str) -> None:
    """To stdout, whose reader may have gone (`| head`)."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """To people."""
    sys.stderr.write(f"{text}\n")


def show(error: DockyardError, *, debug: bool) -> None:
    """What went wrong, and the way out."""
    from rich.console import Console
    from rich.text import Text

    if debug:
        traceback.print_exc()
    console = Console(stderr=True, highlight=False)
    problems = error.problems if isinstance(error, SettingsError) else (SettingProblem(error.message, error.hint),)
    for problem in problems:
        console.print(Text.assemble(("error", "red"), f": {problem.message}"), soft_wrap=True)
        console.print(Text.assemble(("hint", "cyan"), f": {problem.hint}"), soft_wrap=True)


def configure_logging(*, debug: bool) -> None:
    """Our own log lines, and of others' only what is serious."""
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
    """What goes wrong in a trial is on its rollout; Harbor would say it once more for each."""
    return not record.name.startswith("harbor") or record.levelno >= logging.CRITICAL
