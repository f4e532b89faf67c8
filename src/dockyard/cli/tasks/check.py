"""`dockyard tasks check`: is a folder of tasks fit for training?"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dockyard.cli.run_file import COMMON, AddParser, Flag, RunArguments, Work, carry_out, purpose_of, split_overrides
from dockyard.cli.terminal import say
from dockyard.config import RunConfig
from dockyard.errors import UsageError
from dockyard.run_dir.durable import refuse_below_file
from dockyard.run_dir.resume import CheckPurpose
from dockyard.run_dir.run import Purpose, ResumedRun, RunDir

if TYPE_CHECKING:
    from dockyard.collect.check import Candidates

_ABOUT = (
    "Run each task's own solution (`oracle`), which must earn the full reward, and an agent that does nothing (`nop`), "
    "which must not. Name broken tasks, tasks without a solution and duplicates. Exit code 0: all tasks are good."
)
_VERB = "tasks check"
_USAGE = "dockyard tasks check DIR [--difficulty K --model NAME] [--keep DIR] [--section.key VALUE ...] [options]"
_READ_ALWAYS = ("run_dir", "seed", "environment", "rollout", "gateway")
_READ_BY_POLICY = ("agent", "model", "engine", "sampling")
_SHORT = {"--model": "--model.name", "--agent": "--agent.name", "--concurrency": "--rollout.concurrency"}


def several(text: str) -> int:
    """A whole number from 2: of one rollout, none or all are solved."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"`{text}` is no whole number from 2")
    return int(text)


_DIFFICULTY = Flag(
    "--difficulty",
    "have a policy attempt each good task K times; those always or never solved are not good",
    {"metavar": "K", "type": several},
)
FLAGS = (
    _DIFFICULTY,
    Flag("--report", "write the report here as well, as JSON", {"metavar": "FILE", "type": Path}),
    Flag("--keep", "copy the good tasks to this new folder", {"metavar": "DIR", "type": Path}),
)


def add(add_parser: AddParser) -> None:
    """Describe the source. Its words are taken as they are, since settings among them are not argparse's to read."""
    parser = add_parser("check", help="run solutions, find bad tasks", add_help=False, prefix_chars="\0")
    parser.add_argument("words", nargs="*")
    parser.set_defaults(reader=_reader(type(parser)))


def _reader(kind: type[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = kind(
        prog="dockyard tasks check",
        description=_ABOUT,
        usage=_USAGE,
        epilog="`--model`, `--agent` and `--concurrency` are short for `--model.name`, `--agent.name` and "
        "`--rollout.concurrency`; `dockyard rollout --help` lists all settings.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path, help="a task, or a folder of them")
    for flag in (*FLAGS, *COMMON):
        parser.add_argument(flag.name, help=flag.help, **(flag.more or {"action": "store_true"}))
    parser.set_defaults(toml=None)
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Run the check, and print what is not good. Exit code 1 when anything is not."""
    from dockyard.collect.check import find_candidates

    given = _read(arguments)
    began = purpose_of(given, Purpose(verb=_VERB), (_DIFFICULTY,)).check
    candidates = find_candidates(_folder(given))
    purpose = _take_up(began, given, candidates.digest) if began else _begin(given, candidates.digest)
    return carry_out(
        RunArguments.of(given), Purpose(verb=_VERB, check=purpose), lambda config: _work(config, candidates, purpose)
    )


def _read(arguments: argparse.Namespace) -> argparse.Namespace:
    words, overrides = split_overrides(_spelled_out(arguments.words), FLAGS)
    given: argparse.Namespace = arguments.reader.parse_args(words)
    if given.resume and given.folder:
        raise UsageError(f"`{given.folder}` does not go with `--resume`", hint="a resumed check has its own tasks")
    if not given.resume and not given.folder:
        raise UsageError("a check needs a folder of tasks", hint=f"`{_USAGE}`")
    given.overrides = overrides if given.resume else _settings(given, overrides)
    return given


def _spelled_out(words: Sequence[str]) -> list[str]:
    parts = [word.partition("=") for word in words]
    return [_SHORT.get(name, name) + equals + value for name, equals, value in parts]


def _settings(given: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """Those of a check. What it would not read is refused."""
    read = _READ_ALWAYS + (_READ_BY_POLICY if given.difficulty else ())
    for name in (word.partition("=")[0] for word in overrides if word.startswith("--")):
        section = name.removeprefix("--").partition(".")[0]
        if section in RunConfig.model_fields and section not in read:
            hint = "`--difficulty K` has a policy attempt the tasks" if section in _READ_BY_POLICY else "remove it"
            raise UsageError(f"`{name}` has no effect on this check", hint=hint)
    folder = _folder(given)
    # Every task is to be reported, however many of them cannot even start.
    defaults = [f"--run_dir=runs/check-{folder.name}", "--rollout.max_lost_share=1"]
    agent = [] if given.difficulty else ["--agent.name=oracle"]
    return [*defaults, *overrides, *agent, f"--tasks.train={folder}"]


def _folder(given: argparse.Namespace) -> Path:
    """Where the tasks are. `.` and `..` have no name of their own."""
    if not given.resume:
        return Path(os.path.abspath(given.folder))
    folder = ResumedRun.read(given.resume).config.tasks.train
    assert folder is not None, "a check is begun with a folder of tasks"
    return folder


def _begin(given: argparse.Namespace, digest: str) -> CheckPurpose:
    """Refused where its results could not be written."""
    for place, name in ((given.report, "--report"), (given.keep, "--keep")):
        if place:
            refuse_below_file(place, hint=f"choose another `{name}`")
    if given.report and given.report.is_dir():
        raise UsageError(f"`{given.report}` is a folder", hint="`--report FILE.json`")
    if given.keep:
        _refuse_to_keep_in(given.keep, _folder(given))
    return CheckPurpose(
        digest=digest,
        difficulty=given.difficulty,
        report=given.report and given.report.absolute(),
        keep=given.keep and given.keep.absolute(),
    )


def _refuse_to_keep_in(keep: Path, tasks: Path) -> None:
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(f"`{keep}` is already there", hint="`--keep DIR` takes a new or an empty folder")
    if keep.resolve().is_relative_to(tasks.resolve()):
        raise UsageError(f"`{keep}` is inside `{tasks}`, and would be taken for a task", hint="choose another `--keep`")


def _take_up(began: CheckPurpose, given: argparse.Namespace, digest: str) -> CheckPurpose:
    """What the check began with, and where its results are wanted now."""
    if began.digest != digest:
        message = f"the tasks in `{_folder(given)}` have changed since `{given.resume}` began to check them"
        raise UsageError(message, hint="begin another check; `--run_dir DIR` names its folder")
    wanted = _begin(given, digest)
    return began.model_copy(update={"report": wanted.report or began.report, "keep": wanted.keep or began.keep})


def _work(config: RunConfig, candidates: "Candidates", purpose: CheckPurpose) -> Work:
    from dockyard.collect.check import check_tasks, keep_good, prepare_check, write_report

    prepared = prepare_check(config, difficulty=purpose.difficulty)

    def work(run: RunDir) -> int:
        report = check_tasks(run, candidates, prepared, difficulty=purpose.difficulty)
        say(f"\n{report.table()}")
        if purpose.report:
            write_report(purpose.report, report)
        if purpose.keep:
            keep_good(purpose.keep, report)
        return 0 if report.good == report.tasks else 1

    return work
