"""`dockyard backend prime-rl FILE` for a file that is Prime-RL's own and no run file."""

import argparse
import shlex
from pathlib import Path

from dockyard.cli.run_file import EXIT_STOPPED
from dockyard.cli.terminal import print_data, say
from dockyard.errors import UsageError
from dockyard.process import stopped_by_signals
from dockyard.settings.load import read_toml

_OF_RUNS = ("resume", "overwrite", "drop", "json")
_MARK = "orchestrator"
"""What every file of Prime-RL's has and no run file of ours."""


def is_own(file: Path) -> bool:
    """Whether the file is Prime-RL's and no run file."""
    return file.is_file() and _MARK in read_toml(file)


def act(arguments: argparse.Namespace) -> int:
    """Launch it as it is, or translated. Options that are none of ours are for Prime-RL."""
    from dockyard.backends.launch import clear_away, start
    from dockyard.backends.prime_rl.launch import check_installed, find_rl
    from dockyard.backends.prime_rl.own_file import read_own_file

    for name in _OF_RUNS:
        if vars(arguments)[name]:
            hint = "Prime-RL has options of its own, e.g. `--resume.step 20` or `--clean`"
            raise UsageError(f"`--{name}` does not go with `{arguments.toml}`, which is no run file", hint=hint)
    own = read_own_file(arguments.toml)
    rl = find_rl(None)
    launch = own.launch(rl, arguments.overrides)
    for note in launch.notes:
        say(note)
    if arguments.dry_run:
        print_data(f"{own.text or ''}# command\n{shlex.join(launch.command)}\n")
        return 0
    own.write()
    if arguments.write:
        say(f"wrote `{own.file}`" if own.text else f"`{own.file}` is in today's form; nothing to write")
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
