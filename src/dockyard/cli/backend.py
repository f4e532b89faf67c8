"""`dockyard backend slime|prime-rl`: the same run file on an engine for many GPUs."""

import argparse
import json
import shlex
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from dockyard.cli import prime_rl_file
from dockyard.cli.run_file import (
    AddParser,
    Flag,
    RunArguments,
    Work,
    add_run_verb,
    carry_out,
    purpose_of,
    short,
)
from dockyard.cli.terminal import print_data, say
from dockyard.config import RunConfig
from dockyard.run_dir.run import Purpose, RunDir
from dockyard.settings.load import written_settings

if TYPE_CHECKING:
    from dockyard.backends.launch import Backend, BackendLaunch

type _Verb = Literal["backend slime", "backend prime-rl"]

_DROP = Flag("--drop", "run without these settings, which the backend ignores", {"metavar": "KEY,KEY"})
FLAGS = (Flag("--write", "write the run's folder with all files, and start nothing"), _DROP)
_ABOUT: dict[_Verb, str] = {
    "backend slime": "Train with SLiME: Megatron, SGLang and Ray.",
    "backend prime-rl": "Train with Prime-RL: FSDP and vLLM.",
}


def add(add_parser: AddParser) -> None:
    """Describe the verb."""
    about = "Train on an engine for many GPUs: the same run file, tasks, agents and failure rules."
    parser = add_parser("backend", help="train on SLiME or Prime-RL", description=about)
    names = parser.add_subparsers(dest="backend", metavar="NAME", required=True)
    for verb, what in _ABOUT.items():
        add_run_verb(names.add_parser, verb, f"{what} A setting that it would ignore is refused.", FLAGS)


def act(arguments: argparse.Namespace) -> int:
    """Launch the run, or say what would be launched."""
    from dockyard.backends.launch import refuse_ignored

    if arguments.backend == "prime-rl" and arguments.toml and prime_rl_file.is_own(arguments.toml):
        return prime_rl_file.act(arguments)
    verb: _Verb = next(verb for verb in _ABOUT if verb.endswith(f" {arguments.backend}"))
    module = arguments.backend.replace("-", "_")
    backend: Backend = import_module(f"dockyard.backends.{module}.launch").BACKEND  # only the one that is asked for
    purpose = purpose_of(arguments, Purpose(verb=verb), (_DROP,))
    drop = tuple(key.strip() for key in (arguments.drop or "").split(",") if key.strip())
    run_arguments = replace(RunArguments.of(arguments), drop=drop)
    written = written_settings(run_arguments.toml, run_arguments.overrides).without(drop)
    config = run_arguments.config()
    refuse_ignored(backend, config, written)
    if run_arguments.dry_run:
        return _describe(backend, config, as_json=run_arguments.json)
    write_only: bool = arguments.write
    return carry_out(run_arguments, purpose, lambda config: _work(backend, config, write_only=write_only))


def _describe(backend: "Backend", config: RunConfig, *, as_json: bool) -> int:
    launch = backend.plan(config, config.run_dir.absolute())
    _say_notes(launch)
    if config.tasks.passes and config.tasks.source != "recorded":
        say("the number of steps follows from the number of tasks, which a dry run does not look for")
    if as_json:
        parts = {name: getattr(launch, name) for name in ("command", "environment", "files", "notes")}
        print_data(json.dumps({"settings": config.model_dump(mode="json"), **parts}, indent=2) + "\n")
        return 0
    for name, text in launch.files.items():
        print_data(f"# {name}\n{text}\n")
    print_data(f"# command\n{shlex.join(launch.command)}\n")
    return 0


def _say_notes(launch: "BackendLaunch") -> None:
    for note in launch.notes:
        say(note)


def _work(backend: "Backend", config: RunConfig, *, write_only: bool) -> Work:
    from dockyard.backends.launch import clear_away, prepare, start
    from dockyard.collect.open import check_run
    from dockyard.collect.task_sets import check_tasks

    backend.plan(config, config.run_dir.absolute())  # what it refuses must not leave a folder behind
    check_tasks(config)
    if not write_only:
        if config.tasks.source != "recorded":
            check_run(config)
        backend.check(config)

    def work(run: RunDir) -> int:
        launch = prepare(backend, run)
        _say_notes(launch)
        again = f"`dockyard backend {backend.name} --resume {short(run.path)}`"
        if write_only:
            say(f"wrote {_names(run, launch)}; {again} starts it")
            return 0
        try:
            code = start(launch)
        finally:
            clear_away(config.environment.type)
        if code:
            say(f"{backend.name} ended with code {code}; {again} continues from its last checkpoint")
        return 1 if code else 0

    return work


def _names(run: RunDir, launch: "BackendLaunch") -> str:
    return ", ".join(f"`{short(run.paths.backend / name)}`" for name in launch.files)
