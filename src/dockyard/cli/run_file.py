"""What all verbs that take a RUN.toml share: settings, `--resume`, `--overwrite`, `--dry-run`, `--json`, Ctrl-C."""

import argparse
import difflib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dockyard.cli.terminal import print_data, say
from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.process import stopped_by_signals
from dockyard.run_dir.run import Purpose, ResumedRun, RunDir, read_purpose
from dockyard.settings.load import load_run_config
from dockyard.settings.text import settings_help, to_toml

EXIT_STOPPED = 130

type AddParser = Callable[..., argparse.ArgumentParser]
type Work = Callable[[RunDir], int]
"""What a verb does with an open run; its result is the exit code."""


@dataclass(frozen=True, slots=True)
class Flag:
    """An option that is no setting."""

    name: str
    help: str
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    """As argparse's `add_argument` takes it; without any, the option takes no value."""


COMMON = (
    Flag("--dry-run", "print the resolved settings as TOML and stop"),
    Flag("--json", "print JSON: the settings of a dry run, else the summary"),
    Flag("--resume", "continue a run with its own settings", {"metavar": "RUN_DIR", "type": Path}),
    Flag("--overwrite", "first delete the run that is in the run's folder"),
    Flag("--debug", "show tracebacks and more log lines"),
)
_SHORT = {"--agent": "--agent.name"}
"""Settings that may be written shorter."""


def add_run_verb(add_parser: AddParser, verb: str, about: str, flags: Sequence[Flag]) -> None:
    """Describe a verb that takes a RUN.toml."""
    width = min(shutil.get_terminal_size().columns, 120)
    parser = add_parser(
        verb.rpartition(" ")[2],
        help=(about[:1].lower() + about[1:].partition(". ")[0].rstrip(".")).replace("%", "%%"),
        description=f"{about} Relative paths are relative to the current directory.",
        usage=f"dockyard {verb} [RUN.toml] [--section.key VALUE ...] [options]",
        epilog=f"settings, in RUN.toml under [section] or as --section.key VALUE:\n\n{settings_help(RunConfig, width)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("toml", metavar="RUN.toml", nargs="?", type=Path, help="the run's settings")
    parser.add_argument("--agent", metavar="NAME", help="short for `--agent.name NAME`")
    for flag in (*flags, *COMMON):
        parser.add_argument(flag.name, help=flag.help, **(flag.more or {"action": "store_true"}))


def split_overrides(words: Sequence[str], flags: Sequence[Flag]) -> tuple[list[str], list[str]]:
    """Settings apart from the rest, since argparse would take the value of an option it does not know for the file."""
    options = ["--help", *(flag.name for flag in (*flags, *COMMON))]
    left = list(words)
    rest: list[str] = []
    overrides: list[str] = []
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in options:
            rest.append(word)
            continue
        _refuse_misspelt(name, options)
        overrides.append(_SHORT.get(name, name) + equals + value)
        if not equals and left and not left[0].startswith("--"):
            overrides.append(left.pop(0))
    return rest, overrides


def _refuse_misspelt(name: str, options: Sequence[str]) -> None:
    if "." in name or name.removeprefix("--") in RunConfig.model_fields:
        return
    if near := difflib.get_close_matches(name, options, 1, cutoff=0.8):
        raise UsageError(f"`{name}` is not an option", hint=f"did you mean `{near[0]}`?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments:
    """The command line of a verb that takes a RUN.toml."""

    toml: Path | None
    overrides: tuple[str, ...]
    resume: Path | None
    overwrite: bool
    dry_run: bool
    json: bool
    drop: tuple[str, ...] = ()
    """Settings that count as not written."""

    @classmethod
    def of(cls, arguments: argparse.Namespace, *more_overrides: str) -> Self:
        """Refused where it contradicts itself."""
        if arguments.resume and (arguments.toml or arguments.overwrite):
            culprit = f"`{arguments.toml}`" if arguments.toml else "`--overwrite`"
            hint = "a resumed run has its own settings and folder"
            raise UsageError(f"{culprit} does not go with `--resume`", hint=hint)
        return cls(
            toml=arguments.toml,
            overrides=(*arguments.overrides, *more_overrides),
            resume=arguments.resume,
            overwrite=arguments.overwrite,
            dry_run=arguments.dry_run,
            json=arguments.json,
        )

    def config(self) -> RunConfig:
        """The settings the run would have."""
        return self.read().config

    def read(self) -> "RunSettings":
        """Read the settings once, for `carry_out`."""
        resumed = ResumedRun.read(self.resume, self.overrides) if self.resume else None
        config = resumed.config if resumed else load_run_config(self.toml, self.overrides, drop=self.drop)
        return RunSettings(config=config, resumed=resumed)

    def open(self, settings: "RunSettings", purpose: Purpose) -> RunDir:
        """The run's folder, new or as it was left."""
        if settings.resumed:
            return RunDir.reopen(settings.resumed)
        config = settings.config
        return RunDir.create(config.run_dir, config, overwrite=self.overwrite, purpose=purpose)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run, and of a resumed run those it had before."""

    config: RunConfig
    resumed: ResumedRun | None


def purpose_of(arguments: argparse.Namespace, fresh: Purpose, flags: Sequence[Flag]) -> Purpose:
    """What the run is for: a resumed one goes on with what it began with, so `flags` are not for it."""
    was = read_purpose(arguments.resume) if arguments.resume else None
    if was is None:
        return fresh
    if was.verb != fresh.verb:
        hint = f"`dockyard {was.verb} --resume {arguments.resume}` continues it"
        raise UsageError(f"`{arguments.resume}` was begun by `dockyard {was.verb}`", hint=hint)
    for flag in flags:
        if vars(arguments)[flag.name.removeprefix("--").replace("-", "_")]:
            raise UsageError(f"`{flag.name}` does not go with `--resume`", hint="a run goes on with what it began with")
    return was


def carry_out(arguments: RunArguments, purpose: Purpose, prepare: Callable[[RunConfig], Work]) -> int:
    """Open the run and do the work. `prepare` finds what must fail before a folder is made."""
    settings = arguments.read()
    config = settings.config
    if arguments.dry_run:
        print_data(config.model_dump_json(indent=2) + "\n" if arguments.json else to_toml(config))
        return 0
    work = prepare(config)
    with arguments.open(settings, purpose) as run:
        try:
            with stopped_by_signals():
                code = work(run)
        except KeyboardInterrupt:
            say(f"stopped; `dockyard {purpose.verb} --resume {short(run.path)}` continues")
            return EXIT_STOPPED
        except DockyardError:
            if not arguments.resume:
                run.discard()
            raise
        if arguments.json:
            print_data(json.dumps(run.read_summary(), indent=2) + "\n")
    return code


def short(path: Path) -> Path:
    """As a person in this folder would write it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
