"""`dockyard VERB [run.toml] [--section.key value]`: reads the command line, opens the run, says what went wrong.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 misuse, 130 stopped by a signal.
"""

import argparse
import difflib
import json
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from dockyard import __version__
from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.interrupt import stopped_by_signals
from dockyard.run_dir import RunDir, resumed_config
from dockyard.serve.options import ServeOptions, add_serve, as_flag
from dockyard.settings import load_run_config
from dockyard.settings.problems import Problem, SettingsError
from dockyard.settings.text import settings_help, to_toml

EXIT_FAILED, EXIT_STOPPED = 1, 130

# Read by Harbor and what it imports: no telemetry, no price list fetched on import, no warning at each fork.
_ENVIRONMENT = {
    "HARBOR_TELEMETRY": "off",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TOKENIZERS_PARALLELISM": "false",
}
_VERBS = ("train", "serve", "doctor", "tasks")
_TRAIN_FLAGS = ("--dry-run", "--json", "--resume", "--overwrite", "--debug", "--help")


class RunTraining(Protocol):
    """The training loop, as the command line calls it."""

    def __call__(self, config: RunConfig, *, run_dir: RunDir) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainArguments:
    toml: Path | None
    overrides: list[str]
    resume: Path | None
    overwrite: bool
    dry_run: bool
    json: bool


def main(argv: Sequence[str] | None = None, *, run_training: RunTraining | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _configure_logging(debug=debug)
    try:
        return _dispatch(words, run_training)
    except KeyboardInterrupt:
        _say("stopped")
        return EXIT_STOPPED
    except DockyardError as error:
        _show(error, debug=debug)
        return error.exit_code
    except Exception as error:  # a mistake of ours: the user gets one line of it unless they ask for more
        hint = "this is a bug; `--debug` shows the traceback, which a run also keeps in its `crash.txt`"
        _show(DockyardError(f"unexpected {type(error).__name__}: {error}", hint=hint), debug=debug)
        return EXIT_FAILED


def _dispatch(words: list[str], run_training: RunTraining | None) -> int:
    overrides: list[str] = []
    if words and not words[0].startswith("-") and words[0] not in _VERBS:
        near = difflib.get_close_matches(words[0], _VERBS, 1)
        hint = f"did you mean `dockyard {near[0]}`?" if near else f"the verbs are {', '.join(_VERBS)}"
        raise UsageError(f"`{words[0]}` is not a verb", hint=hint)
    if words[:1] == ["train"]:
        words, overrides = _split_overrides(words)
    elif words[:1] == ["serve"]:
        words = [as_flag(word) for word in words]
    arguments = _parser().parse_args(words)
    match arguments.verb:
        case "doctor":
            from dockyard.doctor import main as doctor_main

            about = [arguments.model] if arguments.model is not None else []
            return doctor_main([*about, *(["--json"] if arguments.json else [])])
        case "serve":
            return _serve(ServeOptions.of(arguments))
        case "tasks":
            return _write_demo_tasks(arguments.folder)
        case _:
            train = _TrainArguments(
                toml=arguments.toml,
                overrides=overrides,
                resume=arguments.resume,
                overwrite=arguments.overwrite,
                dry_run=arguments.dry_run,
                json=arguments.json,
            )
            return _train(train, run_training)


class _Parser(argparse.ArgumentParser):
    """Mistakes become our errors instead of argparse's usage text."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"`{self.prog} --help` says how it is used")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dockyard", description="Train coding agents by reinforcement learning on Harbor tasks.")
    parser.add_argument("--version", action="version", version=f"dockyard {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_train(verbs.add_parser)
    serve = add_serve(verbs.add_parser)
    doctor = verbs.add_parser(
        "doctor",
        help="what this machine can run, or how a model is prompted",
        description="What this machine can run; with MODEL, how that model's prompts are built and which agents fit.",
    )
    doctor.add_argument("model", metavar="MODEL", nargs="?", help="a model folder, a Hub name, or `smollm2-135m`")
    doctor.add_argument("--json", action="store_true", help="print the report as data")
    tasks = verbs.add_parser("tasks", help="make task folders", description="Make task folders.")
    sources = tasks.add_subparsers(dest="source", metavar="SOURCE", required=True)
    demo = sources.add_parser("demo", help="small shell tasks", description="Write the demo's tasks to a folder.")
    demo.add_argument("folder", metavar="DIR", type=Path)
    for verb in (serve, doctor, demo):
        verb.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _add_train(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    width = min(shutil.get_terminal_size().columns, 120)
    train = add_parser(
        "train",
        help="train a policy on tasks",
        description="Train a policy on tasks. Relative paths are relative to the current directory.",
        usage="dockyard train [RUN.toml] [--section.key VALUE ...] [options]",
        epilog=f"settings, in RUN.toml under [section] or as --section.key VALUE:\n\n{settings_help(RunConfig, width)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    train.add_argument("toml", metavar="RUN.toml", nargs="?", type=Path, help="the run's settings")
    train.add_argument("--dry-run", action="store_true", help="print the resolved settings as TOML and stop")
    train.add_argument("--json", action="store_true", help="print JSON: the settings of a dry run, else the summary")
    train.add_argument("--resume", metavar="RUN_DIR", type=Path, help="continue a run with its own settings")
    train.add_argument("--overwrite", action="store_true", help="first delete the run that is in the run's folder")
    train.add_argument("--debug", action="store_true", help="show tracebacks and more log lines")


def _split_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """Settings apart from the rest, since argparse would take the value of an option it does not know for the file."""
    rest: list[str] = []
    overrides: list[str] = []
    while words:
        word, *words = words
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or name in _TRAIN_FLAGS:
            rest.append(word)
            continue
        _refuse_misspelt_flag(name)
        overrides.append(word)
        if not equals and words and not words[0].startswith("--"):
            overrides.append(words[0])
            words = words[1:]
    return rest, overrides


def _refuse_misspelt_flag(name: str) -> None:
    if "." in name or name.removeprefix("--") in RunConfig.model_fields:
        return
    if near := difflib.get_close_matches(name, _TRAIN_FLAGS, 1, cutoff=0.8):
        raise UsageError(f"`{name}` is not an option", hint=f"did you mean `{near[0]}`?")


def _train(arguments: _TrainArguments, run_training: RunTraining | None) -> int:
    if arguments.resume and (arguments.toml or arguments.overwrite):
        culprit = f"`{arguments.toml}`" if arguments.toml else "`--overwrite`"
        raise UsageError(f"{culprit} does not go with `--resume`", hint="a resumed run has its own settings and folder")
    config = _read_config(arguments)
    if arguments.dry_run:
        _print(config.model_dump_json(indent=2) + "\n" if arguments.json else to_toml(config))
        return 0
    run_training = run_training or _load_training()
    with _open_run(arguments, config) as run:
        try:
            with stopped_by_signals():
                run_training(run.config, run_dir=run)
        except KeyboardInterrupt:
            _say(f"stopped; `dockyard train --resume {_short(run.path)}` continues")
            return EXIT_STOPPED
        if arguments.json:
            _print(json.dumps(run.read_summary(), indent=2) + "\n")
    return 0


def _read_config(arguments: _TrainArguments) -> RunConfig:
    if arguments.resume:
        return resumed_config(arguments.resume, arguments.overrides)
    return load_run_config(arguments.toml, arguments.overrides)


def _open_run(arguments: _TrainArguments, config: RunConfig) -> RunDir:
    if arguments.resume:
        return RunDir.resume(arguments.resume, arguments.overrides)
    return RunDir.create(config.run_dir, config, overwrite=arguments.overwrite)


def _load_training() -> RunTraining:
    """Before the run's folder is made: without torch there is nothing to begin."""
    try:
        from dockyard.trainer import run_training
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("dockyard"):
            raise
        raise DockyardError(
            f"training needs `{error.name}`, which is not installed", hint="`pip install 'dockyard[train]'`"
        ) from error
    return run_training


def _serve(options: ServeOptions) -> int:
    """Until a signal comes, which raises KeyboardInterrupt."""
    from dockyard.serve.server import serve

    with stopped_by_signals():
        serve(options, _say)
    return 0


def _short(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _configure_logging(*, debug: bool) -> None:
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


def _print(text: str) -> None:
    """To stdout, whose reader may have gone (`| head`)."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _show(error: DockyardError, *, debug: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    if debug:
        traceback.print_exc()
    console = Console(stderr=True, highlight=False)
    problems = error.problems if isinstance(error, SettingsError) else (Problem(error.message, error.hint),)
    for problem in problems:
        console.print(Text.assemble(("error", "red"), f": {problem.message}"), soft_wrap=True)
        console.print(Text.assemble(("hint", "cyan"), f": {problem.hint}"), soft_wrap=True)


def _write_demo_tasks(folder: Path) -> int:
    from dockyard.tasks.demo import write_demo_tasks

    for name in ("train", "heldout"):
        if (folder / name).exists():
            raise UsageError(f"`{folder / name}` is already there", hint="choose another folder, or remove it first")
    write_demo_tasks(folder)
    _say(f"wrote {folder / 'train'} and {folder / 'heldout'}")
    return 0
