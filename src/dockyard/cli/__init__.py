"""`dockyard VERB [run.toml] [--section.key value]`: finds the verb, runs it, says what went wrong.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 misuse, 130 stopped by a signal.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dockyard import __version__
from dockyard.cli import agents, backend, convert, doctor, evaluate, export, rollout, serve, tasks, train
from dockyard.cli.run_file import EXIT_STOPPED, split_overrides
from dockyard.cli.terminal import configure_logging, say, show
from dockyard.cli.train import RunTraining
from dockyard.errors import DockyardError, UsageError
from dockyard.settings.load import read_dotenv

EXIT_FAILED = 1
_PATH_ERRORS = (NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError)

# Read by Harbor and what it imports: no telemetry, no price list fetched on import, no warning at each fork.
_ENVIRONMENT = {
    "HARBOR_TELEMETRY": "off",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TOKENIZERS_PARALLELISM": "false",
}
_VERBS = {
    "train": train,
    "rollout": rollout,
    "eval": evaluate,
    "convert": convert,
    "export": export,
    "serve": serve,
    "backend": backend,
    "tasks": tasks,
    "agents": agents,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None, *, run_training: RunTraining | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    configure_logging(debug=debug)
    try:
        read_dotenv()
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        arguments = _parse(words)
        arguments.run_training = run_training
        return _VERBS[arguments.verb].act(arguments)
    except KeyboardInterrupt:
        say("stopped")
        return EXIT_STOPPED
    except DockyardError as error:
        show(error, debug=debug)
        return error.exit_code
    except Exception as error:
        show(_explained(error), debug=debug)
        return EXIT_FAILED


def _explained(error: Exception) -> DockyardError:
    """A path may be the user's to change; the rest are mistakes of ours, one line of which is shown."""
    if isinstance(error, _PATH_ERRORS) and error.filename:
        hint = "choose another path, or make it accessible; `--debug` shows the traceback"
        return DockyardError(f"`{os.fsdecode(error.filename)}`: {error.strerror}", hint=hint)
    hint = "this is a bug; `--debug` shows the traceback, which a run also keeps in its `crash.txt`"
    return DockyardError(f"unexpected {type(error).__name__}: {error}", hint=hint)


def _parse(words: list[str]) -> argparse.Namespace:
    verb = words[0] if words and not words[0].startswith("-") else None
    if verb and verb not in _VERBS:
        near = difflib.get_close_matches(verb, _VERBS, 1)
        hint = f"did you mean `dockyard {near[0]}`?" if near else f"the verbs are {', '.join(_VERBS)}"
        raise UsageError(f"`{verb}` is not a verb", hint=hint)
    overrides: list[str] = []
    if verb == "serve":
        words = serve.as_flags(words)
    elif verb in ("train", "rollout", "eval", "backend"):
        words, overrides = split_overrides(words, _VERBS[verb].FLAGS)
    arguments = _parser().parse_args(words)
    arguments.overrides = overrides
    return arguments


class _Parser(argparse.ArgumentParser):
    """Mistakes become our errors instead of argparse's usage text."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"`{self.prog} --help` says how it is used")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dockyard", description="Train coding agents by reinforcement learning on Harbor tasks.")
    parser.add_argument("--version", action="version", version=f"dockyard {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in _VERBS.values():
        verb.add(verbs.add_parser)
    return parser
