"""`dockyard tasks check`: find tasks that are not fit for training."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dockyard.cli.args import Flag, Given, Verb, integer_from
from dockyard.cli.runs import RUN_FLAGS, carry_out, purpose_of, request_of
from dockyard.cli.terminal import say
from dockyard.config import RunConfig
from dockyard.errors import UsageError
from dockyard.run_dir.durable import refuse_below_file
from dockyard.run_dir.resume import CheckPurpose
from dockyard.run_dir.run import Purpose, RunDir
from dockyard.settings.load import load
from dockyard.settings.overrides import Overrides, Patch
from dockyard.settings.text import settings_by_key, value_at
from dockyard.verbs import RunSettings, VerbResult, Work, refuse_with_resume

if TYPE_CHECKING:
    from dockyard.collect.check import Candidates

_NAME = "tasks check"
_READ_ALWAYS = ("run_dir", "seed", "environment", "rollout", "gateway")
_READ_BY_POLICY = ("agent", "model", "engine", "sampling")
_DIFFICULTY = Flag(
    "--difficulty",
    "let a policy attempt each good task K times; report tasks that it always or never solves",
    {"metavar": "K", "type": integer_from(2)},  # of one rollout, none or all are solved
)
_FLAGS = (
    Flag("source", "a task folder, a folder of them, or a run file", {"metavar": "DIR", "nargs": "?", "type": Path}),
    _DIFFICULTY,
    Flag("--report", "also write the report to this file, as JSON", {"metavar": "FILE", "type": Path}),
    Flag("--keep", "copy the good tasks to this new folder", {"metavar": "DIR", "type": Path}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """Which tasks are checked, and with which settings."""

    folder: Path
    settings: RunSettings


def _check(given: Given) -> int:
    from dockyard.collect.check import find_candidates

    began = purpose_of(given, Purpose(verb=_NAME), (_DIFFICULTY,)).check
    subject = _subject(given)
    candidates = find_candidates(subject.folder)
    wanted = _purpose(given, subject.folder, candidates.digest)
    check = _continued(began, wanted, given, subject.folder) if began else wanted
    purpose = Purpose(verb=_NAME, check=check)
    return carry_out(given, subject.settings, purpose, lambda config, _: _prepare(config, candidates, check))


def _subject(given: Given) -> _Subject:
    source: Path | None = given.flags.source
    if given.flags.resume:
        refuse_with_resume({str(source): source}, resume="--resume", hint="a resumed check has its own tasks")
        settings = request_of(given, None).load()
        assert settings.config.tasks.train is not None, "a check starts with a folder of tasks"
        return _Subject(folder=settings.config.tasks.train, settings=settings)
    if not source:
        raise UsageError("a check needs a folder of tasks", hint="`dockyard tasks check DIR`")
    _refuse_unread(given)
    toml = source if source.suffix == ".toml" and not source.is_dir() else None
    # `.` and `..` have no name of their own.
    folder = Path(os.path.abspath(_tasks_of(toml, given) if toml else source))
    request = request_of(replace(given, overrides=_overrides(given, folder)), toml)
    return _Subject(folder=folder, settings=request.load())


def _tasks_of(toml: Path, given: Given) -> Path:
    tasks = load(RunConfig, toml, given.overrides).tasks
    if tasks.source != "folder" or tasks.train is None:
        hint = "`dockyard tasks check DIR` names the folder of tasks itself"
        why = "`tasks.train` is not set" if tasks.source == "folder" else f"`tasks.source` is `{tasks.source}`"
        raise UsageError(f"`{toml}` names no folder of tasks: {why}", hint=hint)
    return tasks.train


def _sections(given: Given) -> tuple[str, ...]:
    return _READ_ALWAYS + (_READ_BY_POLICY if given.flags.difficulty else ())


def _refuse_unread(given: Given) -> None:
    """A setting on the command line that a check does not read is an error."""
    for key, patch in given.overrides.assignments():
        section = key.partition(".")[0]
        if section not in _sections(given):
            hint = (
                "add `--difficulty K`: then a policy attempts the tasks" if section in _READ_BY_POLICY else "remove it"
            )
            raise UsageError(f"`{patch.flag}` has no effect on this check", hint=hint)


def _overrides(given: Given, folder: Path) -> Overrides:
    """The settings of a check: those of the file that a check reads, and a folder of its own.

    `rollout.max_lost_share` is 1 because every task is reported, however many cannot even start.
    """
    read = _sections(given)
    unread = [key for key in settings_by_key(RunConfig) if key.partition(".")[0] not in read]
    defaults = {key: value_at(RunConfig(), key) for key in (*unread, "sampling.eval_temperature")}
    own = {"run_dir": Path("runs", f"check-{folder.name}"), "rollout.max_lost_share": 1.0}
    agent = {} if given.flags.difficulty else {"agent.name": "oracle"}
    return given.overrides.before(Patch({**defaults, **own, **agent, "tasks.train": folder}, f"dockyard {_NAME}"))


def _purpose(given: Given, folder: Path, digest: str) -> CheckPurpose:
    """Refuse results that could not be written, before anything runs."""
    report: Path | None = given.flags.report
    keep: Path | None = given.flags.keep
    for place, name in ((report, "--report"), (keep, "--keep")):
        if place:
            refuse_below_file(place, hint=f"choose another `{name}`")
    if report and report.is_dir():
        raise UsageError(f"`{report}` is a folder", hint="`--report FILE.json` names a file")
    if keep:
        _refuse_to_keep_in(keep, folder)
    return CheckPurpose(
        digest=digest,
        difficulty=given.flags.difficulty,
        report=report and report.absolute(),
        keep=keep and keep.absolute(),
    )


def _refuse_to_keep_in(keep: Path, tasks: Path) -> None:
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(f"`{keep}` already exists", hint="`--keep DIR` takes a new or an empty folder")
    if keep.resolve().is_relative_to(tasks.resolve()):
        hint = "choose another `--keep`"
        raise UsageError(f"`{keep}` is inside `{tasks}`, so it would be read as a task", hint=hint)


def _continued(began: CheckPurpose, wanted: CheckPurpose, given: Given, folder: Path) -> CheckPurpose:
    """The purpose that the check started with; its results may go to other places."""
    if began.digest != wanted.digest:
        message = f"the tasks in `{folder}` have changed since `{given.flags.resume}` started to check them"
        raise UsageError(message, hint="start another check; `--run_dir DIR` names its folder")
    return began.model_copy(update={"report": wanted.report or began.report, "keep": wanted.keep or began.keep})


def _prepare(config: RunConfig, candidates: "Candidates", purpose: CheckPurpose) -> Work:
    from dockyard.collect.check import check_tasks, keep_good, prepare_check, write_report

    prepared = prepare_check(config, difficulty=purpose.difficulty)

    def work(run: RunDir) -> VerbResult:
        report = check_tasks(run, candidates, prepared, difficulty=purpose.difficulty)
        say(f"\n{report.table()}")  # before anything else can fail
        if purpose.report:
            write_report(purpose.report, report)
        if purpose.keep:
            keep_good(purpose.keep, report)
        return VerbResult(ok=report.good == report.tasks)

    return work


VERBS = (
    Verb(
        name=_NAME,
        about="Find tasks that are unfit for training. Each task's own solution (`oracle`) must earn the full reward; "
        "an agent that does nothing (`nop`) must not. Broken tasks, tasks without a solution and duplicates are "
        "listed. The exit code is 0 when all tasks are good. With a RUN.toml, its `tasks.train` is checked with the "
        "settings of its sections " + ", ".join(f"`{name}`" for name in _READ_ALWAYS[2:]) + " (and with `--difficulty` "
        "also " + ", ".join(f"`{name}`" for name in _READ_BY_POLICY) + ").",
        act=_check,
        usage="DIR|RUN.toml [--difficulty K --model NAME] [--keep DIR] [--section.key VALUE ...] [options]",
        flags=(*_FLAGS, *RUN_FLAGS),
        settings=RunConfig,
        unread=tuple(name for name in RunConfig.model_fields if name not in _READ_ALWAYS + _READ_BY_POLICY),
        aliases={"--model": "model.name", "--agent": "agent.name", "--concurrency": "rollout.concurrency"},
    ),
)
