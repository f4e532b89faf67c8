"""`dockyard backend slime|prime-rl`: train on many GPUs with the same run file.

`dockyard backend prime-rl` also takes a file in Prime-RL's own format, and passes it the words that are not our flags.
"""

import json
import shlex
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dockyard.cli.args import Flag, Given
from dockyard.cli.runs import carry_out, purpose_of, request_of, run_verb, short
from dockyard.cli.terminal import EXIT_STOPPED, print_data, say
from dockyard.config import RunConfig
from dockyard.errors import UsageError
from dockyard.process import stopped_by_signals
from dockyard.run_dir.run import Purpose, RunDir
from dockyard.settings.load import read_toml, written_settings
from dockyard.verbs import VerbResult, Work

if TYPE_CHECKING:
    from dockyard.backends.launch import Backend, BackendLaunch

type _Name = Literal["backend slime", "backend prime-rl"]

_DROP = Flag("--drop", "run without these settings, which the backend ignores", {"metavar": "KEY,KEY"})
_FLAGS = (Flag("--write", "write the run folder with all files, but start nothing"), _DROP)
_NOT_FOR_OWN_FILES = ("resume", "overwrite", "drop", "json")
_OWN_FILE_MARK = "orchestrator"
"""A table that every Prime-RL file has and no run file of ours."""


def _slime(given: Given) -> int:
    return _launch("backend slime", "dockyard.backends.slime.launch", given)


def _prime_rl(given: Given) -> int:
    file: Path | None = given.flags.toml
    if file and file.is_file() and _OWN_FILE_MARK in read_toml(file):
        return _run_own_file(file, given)
    return _launch("backend prime-rl", "dockyard.backends.prime_rl.launch", given)


def _launch(name: _Name, module: str, given: Given) -> int:
    from dockyard.backends.launch import refuse_ignored

    backend: Backend = import_module(module).BACKEND  # imports only the backend that is used
    flags = given.flags
    purpose = purpose_of(given, Purpose(verb=name), (_DROP,))
    drop = tuple(key.strip() for key in (flags.drop or "").split(",") if key.strip())
    request = replace(request_of(given, flags.toml), drop=drop)
    written = written_settings(request.toml, request.overrides).without(drop)
    settings = request.load()
    refuse_ignored(backend, settings.config, written)
    if flags.dry_run:
        return _describe(backend, settings.config, as_json=flags.json)
    return carry_out(given, settings, purpose, lambda config, _: _prepare(backend, config, write_only=flags.write))


def _describe(backend: "Backend", config: RunConfig, *, as_json: bool) -> int:
    launch = backend.plan(config, config.run_dir.absolute())
    _say_notes(launch)
    if config.tasks.passes and config.tasks.source != "recorded":
        say("the number of steps depends on the number of tasks, which a dry run does not count")
    if as_json:
        parts = {
            "settings": config.model_dump(mode="json"),
            "command": launch.command,
            "environment": launch.environment,
            "files": launch.files,
            "notes": launch.notes,
        }
        print_data(json.dumps(parts, indent=2) + "\n")
        return 0
    for name, text in launch.files.items():
        print_data(f"# {name}\n{text}\n")
    print_data(f"# command\n{shlex.join(launch.command)}\n")
    return 0


def _say_notes(launch: "BackendLaunch") -> None:
    for note in launch.notes:
        say(note)


def _prepare(backend: "Backend", config: RunConfig, *, write_only: bool) -> Work:
    from dockyard.backends.launch import clear_away, prepare, start
    from dockyard.collect.open import check_run
    from dockyard.collect.task_sets import check_tasks

    backend.plan(config, config.run_dir.absolute())  # a plan that is refused must not leave a folder behind
    check_tasks(config)
    if not write_only:
        if config.tasks.source != "recorded":
            check_run(config)
        backend.check(config)

    def work(run: RunDir) -> VerbResult:
        launch = prepare(backend, run)
        _say_notes(launch)
        again = f"`dockyard backend {backend.name} --resume {short(run.path)}`"
        if write_only:
            files = ", ".join(f"`{short(run.paths.backend / name)}`" for name in launch.files)
            say(f"wrote {files}; {again} starts it")
            return VerbResult()
        try:
            code = start(launch)
        finally:
            clear_away(config.environment.type)
        if code:
            say(f"{backend.name} ended with code {code}; {again} continues from its last checkpoint")
        return VerbResult(ok=not code)

    return work


def _run_own_file(file: Path, given: Given) -> int:
    """Launch a file in Prime-RL's format as it is, or translated from an older format."""
    from dockyard.backends.launch import clear_away, start
    from dockyard.backends.prime_rl.launch import check_installed, find_rl
    from dockyard.backends.prime_rl.own_file import read_own_file

    for name in _NOT_FOR_OWN_FILES:
        if vars(given.flags)[name]:
            hint = "use Prime-RL's own options, e.g. `--resume.step 20` or `--clean`"
            raise UsageError(f"`--{name}` cannot be combined with `{file}`, which is a Prime-RL file", hint=hint)
    own = read_own_file(file)
    rl = find_rl(None)
    launch = own.launch(rl, given.words)
    _say_notes(launch)
    if given.flags.dry_run:
        print_data(f"{own.text or ''}# command\n{shlex.join(launch.command)}\n")
        return 0
    own.write()
    if given.flags.write:
        say(f"wrote `{own.file}`" if own.text else f"`{own.file}` has the current format; nothing to write")
        return 0
    check_installed(rl)
    try:
        with stopped_by_signals():
            return 1 if start(launch) else 0
    except KeyboardInterrupt:
        say("stopped")
        return EXIT_STOPPED
    finally:
        for environment in own.environments:
            clear_away(environment)


_REFUSES = (
    "The run file, tasks, agents and failure rules are the same as for `dockyard train`. Settings that the backend "
    "would ignore are refused."
)
VERBS = (
    run_verb("backend slime", f"Train with SLiME (Megatron, SGLang and Ray). {_REFUSES}", _slime, _FLAGS),
    run_verb("backend prime-rl", f"Train with Prime-RL (FSDP and vLLM). {_REFUSES}", _prime_rl, _FLAGS),
)
