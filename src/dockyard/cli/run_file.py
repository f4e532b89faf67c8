"""What all verbs that work on a run folder share: `--resume`, `--overwrite`, `--dry-run`, `--json`, Ctrl-C."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dockyard.cli.args import DEBUG, Flag, Given, Verb
from dockyard.cli.terminal import EXIT_STOPPED, print_data, say
from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.process import stopped_by_signals
from dockyard.run_dir.run import Purpose, ResumedRun, RunDir, read_purpose
from dockyard.settings.load import load_run_config
from dockyard.settings.overrides import Overrides
from dockyard.settings.text import to_toml

type Work = Callable[[RunDir], int]
"""Does the work of a verb in an open run folder and returns the exit code."""

RUN_FLAGS = (
    Flag("--dry-run", "print the resolved settings as TOML, and do nothing else"),
    Flag("--json", "print JSON: with `--dry-run` the settings, else the summary of the run"),
    Flag("--resume", "continue the run in this folder with its own settings", {"metavar": "RUN_DIR", "type": Path}),
    Flag("--overwrite", "delete the run that is already in the run folder"),
    DEBUG,
)
RUN_FILE = Flag("toml", "a TOML file with settings", {"metavar": "RUN.toml", "nargs": "?", "type": Path})
AGENT = {"--agent": "agent.name"}


def run_verb(
    name: str, about: str, act: Callable[[Given], int], flags: Sequence[Flag], aliases: dict[str, str] | None = None
) -> Verb:
    """A verb that takes a RUN.toml."""
    return Verb(
        name=name,
        about=f"{about} Relative paths are relative to the current directory.",
        act=act,
        usage="[RUN.toml] [--section.key VALUE ...] [options]",
        flags=(RUN_FILE, *flags, *RUN_FLAGS),
        settings=RunConfig,
        aliases=AGENT | (aliases or {}),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments:
    """The command line of a verb that works on a run folder."""

    toml: Path | None
    overrides: Overrides
    resume: Path | None
    overwrite: bool
    dry_run: bool
    json: bool
    drop: tuple[str, ...] = ()
    """Settings to treat as not written."""

    @classmethod
    def of(cls, given: Given, overrides: Overrides | None = None, toml: Path | None = None) -> Self:
        """Read the flags, and refuse those that contradict `--resume`."""
        flags = given.flags
        if flags.resume and (toml or flags.overwrite):
            culprit = f"`{toml}`" if toml else "`--overwrite`"
            hint = "a resumed run has its own settings and folder"
            raise UsageError(f"{culprit} cannot be combined with `--resume`", hint=hint)
        return cls(
            toml=toml,
            overrides=given.overrides if overrides is None else overrides,
            resume=flags.resume,
            overwrite=flags.overwrite,
            dry_run=flags.dry_run,
            json=flags.json,
        )

    def config(self) -> RunConfig:
        """The settings of the run."""
        return self.read().config

    def read(self) -> "RunSettings":
        """Read the settings once, for `carry_out`."""
        resumed = ResumedRun.read(self.resume, self.overrides) if self.resume else None
        config = resumed.config if resumed else load_run_config(self.toml, self.overrides, drop=self.drop)
        return RunSettings(config=config, resumed=resumed)

    def open(self, settings: "RunSettings", purpose: Purpose) -> RunDir:
        """Create the run folder, or open the one to resume."""
        if settings.resumed:
            return RunDir.reopen(settings.resumed)
        config = settings.config
        return RunDir.create(config.run_dir, config, overwrite=self.overwrite, purpose=purpose)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run, and of a resumed run those it had before."""

    config: RunConfig
    resumed: ResumedRun | None


def purpose_of(given: Given, fresh: Purpose, flags: Sequence[Flag]) -> Purpose:
    """The purpose of the run. A resumed run keeps its own, so `flags` are refused."""
    resume: Path | None = given.flags.resume
    was = read_purpose(resume) if resume else None
    if was is None:
        return fresh
    if was.verb != fresh.verb:
        hint = f"`dockyard {was.verb} --resume {resume}` continues it"
        raise UsageError(f"`{resume}` was started by `dockyard {was.verb}`", hint=hint)
    for flag in flags:
        if vars(given.flags)[flag.key]:
            hint = "a resumed run keeps the flags that it was started with"
            raise UsageError(f"`{flag.name}` cannot be combined with `--resume`", hint=hint)
    return was


def carry_out(arguments: RunArguments, purpose: Purpose, prepare: Callable[[RunConfig], Work]) -> int:
    """Open the run folder and do the work. `prepare` checks everything that can be checked before the folder exists."""
    settings = arguments.read()
    config = settings.config
    if arguments.dry_run:
        _check_extensions(config)
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


def _check_extensions(config: RunConfig) -> None:
    """Check the classes and functions that the settings name. `prepare` does this as well."""
    if config.engine.is_custom:
        from dockyard.engine.custom import check_engine

        check_engine(config.engine)
    if config.tasks.is_custom or config.tasks.order:
        from dockyard.collect.task_sets import check_extensions

        check_extensions(config.tasks)


def short(path: Path) -> Path:
    """The path relative to the current directory, if it is inside it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
