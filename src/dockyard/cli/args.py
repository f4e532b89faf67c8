"""The grammar that all verbs share: `dockyard VERB [FILE] [--section.key VALUE ...] [flags]`.

Words that are settings, or short names for them, go to the settings loader; argparse reads the rest. argparse alone
cannot do it: it would take the value of an option that it does not know for the file.
"""

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dockyard.cli.terminal import Parser
from dockyard.config import Config
from dockyard.errors import UsageError
from dockyard.settings.overrides import Overrides, read_overrides
from dockyard.settings.text import settings_help

if TYPE_CHECKING:
    from dockyard.verbs import RunTraining


@dataclass(frozen=True, slots=True)
class Flag:
    """An argument that is not a setting."""

    name: str
    help: str
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More keyword arguments for argparse's `add_argument`. Without any, the flag takes no value."""

    @property
    def key(self) -> str:
        """Its name in argparse's namespace."""
        return self.name.removeprefix("--").replace("-", "_")


JSON = Flag("--json", "print the result as JSON")
DEBUG = Flag("--debug", "show tracebacks and more log lines")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One verb: what it takes and what it does."""

    name: str
    """What is typed after `dockyard`, e.g. `tasks check`."""
    about: str
    act: Callable[["Given"], int]
    """Does the work and returns the exit code."""
    flags: tuple[Flag, ...]
    """Positional arguments first."""
    usage: str | None = None
    """What follows the name in the usage line. None lists the flags."""
    notes: str = ""
    """Shown at the end of `--help`, before the settings."""
    settings: type[Config] | None = None
    """The settings that the verb reads; None if it takes no settings."""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Short names of settings, e.g. `--agent` -> `agent.name`."""
    unread: tuple[str, ...] = ()
    """Settings and sections that the verb does not read, so `--help` leaves them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the user wrote after the verb."""

    flags: argparse.Namespace
    words: tuple[str, ...]
    """The words that are settings, unparsed."""
    overrides: Overrides
    """The same, parsed."""
    run_training: "RunTraining | None" = None
    """A training loop instead of our own, from Python."""


def parse(verb: Verb, words: Sequence[str], run_training: "RunTraining | None" = None) -> Given:
    """Read the words after the verb. Exits for `--help`."""
    settings: list[str] = []
    overrides = Overrides()
    if verb.settings:
        words, settings = _split(words, verb, verb.settings)
        overrides = read_overrides(verb.settings, settings, verb.aliases)
    flags = _parser(verb).parse_args(words)
    return Given(flags=flags, words=tuple(settings), overrides=overrides, run_training=run_training)


def _split(words: Sequence[str], verb: Verb, settings: type[Config]) -> tuple[list[str], list[str]]:
    """Separate flags and the file from settings."""
    options = ["--help", *(flag.name for flag in verb.flags if flag.name.startswith("--"))]
    left = list(words)
    rest: list[str] = []
    found: list[str] = []
    while left:
        word = left.pop(0)
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or name in options:
            rest.append(word)
            continue
        is_setting = "." in name or name in verb.aliases or name.removeprefix("--") in settings.model_fields
        if not is_setting:
            _refuse_misspelt(name, [*options, *verb.aliases])
        found.append(word)
        if not equals and left and not left[0].startswith("--"):
            found.append(left.pop(0))
    return rest, found


def _refuse_misspelt(name: str, options: Sequence[str]) -> None:
    if near := difflib.get_close_matches(name, options, 1, cutoff=0.8):
        raise UsageError(f"`{name}` is not an option", hint=f"did you mean `{near[0]}`?")


def _parser(verb: Verb) -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"dockyard {verb.name}",
        description=textwrap.fill(verb.about, _width()),
        usage=f"dockyard {verb.name} {verb.usage}" if verb.usage else None,
        epilog="\n\n".join(part for part in (verb.notes, _settings_text(verb)) if part),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag in verb.flags:
        parser.add_argument(flag.name, help=flag.help.replace("%", "%%"), **(flag.more or {"action": "store_true"}))
    return parser


def _settings_text(verb: Verb) -> str:
    if not verb.settings:
        return ""
    text = settings_help(verb.settings, _width(), aliases=verb.aliases, leave_out=verb.unread)
    return f"settings, in the TOML file under [section] or as --section.key VALUE:\n\n{text}"


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 120)


def integer_from(least: int) -> Callable[[str], int]:
    """A type for argparse: integers of at least this size."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, not `{text}`")
        return int(text)

    return read


positive = integer_from(1)
