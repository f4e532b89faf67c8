"""`dockyard VERB [FILE] [--section.key VALUE ...] [flags]`: find the verb, run it, and report errors.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 misuse, 130 stopped by a signal.
The module of a verb is imported only when the verb is used, so `dockyard --help` stays fast.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from dockyard import __version__
from dockyard.cli.terminal import EXIT_STOPPED, Parser, configure_logging, say, show
from dockyard.errors import DockyardError, UsageError

if TYPE_CHECKING:
    from dockyard.cli.args import Verb
    from dockyard.verbs import RunTraining

EXIT_FAILED = 1
_PATH_ERRORS = (NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError)

# For Harbor and its dependencies: no telemetry, no price list downloaded on import, no warning at each fork.
_ENVIRONMENT = {
    "HARBOR_TELEMETRY": "off",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class _Entry:
    module: str
    """The module of `dockyard.cli` whose `VERBS` has the verb."""
    summary: str


VERBS = {
    "train": _Entry("runs", "train a policy on tasks"),
    "rollout": _Entry("runs", "run an agent on tasks without training"),
    "eval": _Entry("runs", "measure pass@1 and pass@k on held-out tasks"),
    "convert": _Entry("convert", "convert a finished Harbor job into training samples"),
    "export": _Entry("export", "write a trained policy as a model folder"),
    "serve": _Entry("serve", "serve a model to agents over HTTP"),
    "backend slime": _Entry("backend", "train with SLiME (Megatron, SGLang, Ray)"),
    "backend prime-rl": _Entry("backend", "train with Prime-RL (FSDP, vLLM)"),
    "tasks check": _Entry("check", "run the solutions of tasks and find broken tasks"),
    "tasks demo": _Entry("tasks", "write small shell tasks"),
    "tasks trail": _Entry("tasks", "write shell tasks that need several turns"),
    "tasks swebench": _Entry("tasks", "write tasks from SWE-bench"),
    "tasks c2bug": _Entry("tasks", "write tasks from a dataset of bugs in git repositories"),
    "agents": _Entry("info", "list the agents and how each is connected"),
    "doctor": _Entry("info", "check what this machine can run, or how a model is prompted"),
}
_GROUPS = {
    "backend": "train on many GPUs with SLiME or Prime-RL",
    "tasks": "create and check task folders",
}
_EPILOG = """first steps:
  dockyard doctor                                what this machine can run
  dockyard train --tasks.source demo --dry-run   every setting with its value, as a TOML file to start from
  dockyard train run.toml --trainer.lr 1e-5      train; settings on the command line override the file
  dockyard VERB --help                           the flags and settings of a verb
"""


def main(argv: Sequence[str] | None = None, *, run_training: "RunTraining | None" = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    configure_logging(debug=debug)
    try:
        name, rest = _find(words)
        return _run(name, rest, run_training)
    except KeyboardInterrupt:
        say("stopped")
        return EXIT_STOPPED
    except DockyardError as error:
        show(error, debug=debug)
        return error.exit_code
    except Exception as error:
        show(_explained(error), debug=debug)
        return EXIT_FAILED


def load_verb(name: str) -> "Verb":
    """Import the module of a verb."""
    verbs: tuple[Verb, ...] = import_module(f"dockyard.cli.{VERBS[name].module}").VERBS
    return next(verb for verb in verbs if verb.name == name)


def _run(name: str, words: Sequence[str], run_training: "RunTraining | None") -> int:
    from dockyard.cli.args import parse
    from dockyard.settings.load import read_dotenv

    read_dotenv()
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    verb = load_verb(name)
    return verb.act(parse(verb, words, run_training))


def _find(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The verb and the words after it. Prints the list of verbs and exits when asked to."""
    for count in (2, 1):
        if (name := " ".join(words[:count])) in VERBS:
            return name, words[count:]
    group = words[0] if words and words[0] in _GROUPS else None
    rest = words[1:] if group else words
    if rest and rest[0] in ("-h", "--help", "--version"):
        _overview(group).parse_args(rest)  # exits
    raise _no_verb(rest, group)


def _no_verb(words: Sequence[str], group: str | None) -> UsageError:
    command = f"dockyard {group}" if group else "dockyard"
    lists = f"`{command} --help` lists the verbs"
    if not words:
        return UsageError(f"`{command}` needs a verb", hint=lists)
    if words[0].startswith("-"):
        return UsageError(f"`{words[0]}` must come after the verb", hint=lists)
    known = _summaries(group)
    near = difflib.get_close_matches(words[0], known, 1)
    hint = f"did you mean `{command} {near[0]}`?" if near else f"the verbs are {', '.join(known)}"
    return UsageError(f"`{words[0]}` is not a verb" + (f" of `{command}`" if group else ""), hint=hint)


def _summaries(group: str | None) -> dict[str, str]:
    """The verbs of a group, or those that come right after `dockyard`."""
    if group:
        prefix = f"{group} "
        return {name.removeprefix(prefix): entry.summary for name, entry in VERBS.items() if name.startswith(prefix)}
    firsts = {name.partition(" ")[0]: entry.summary for name, entry in VERBS.items()}
    return firsts | _GROUPS


def _overview(group: str | None) -> argparse.ArgumentParser:
    about = _GROUPS[group] if group else "train coding agents by reinforcement learning on Harbor tasks"
    parser = Parser(
        prog=f"dockyard {group}" if group else "dockyard",
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=None if group else _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if not group:
        parser.add_argument("--version", action="version", version=f"dockyard {__version__}")
    verbs = parser.add_subparsers(metavar="VERB")
    for name, summary in _summaries(group).items():
        verbs.add_parser(name, help=summary)
    return parser


def _explained(error: Exception) -> DockyardError:
    """Explain an error that no other code explains: a path that the user can change, or a bug."""
    if isinstance(error, _PATH_ERRORS) and error.filename:
        hint = "choose another path, or make it accessible; `--debug` shows the traceback"
        return DockyardError(f"`{os.fsdecode(error.filename)}`: {error.strerror}", hint=hint)
    hint = "this is a bug; `--debug` shows the traceback, and a run keeps it in `crash.txt`"
    return DockyardError(f"unexpected {type(error).__name__}: {error}", hint=hint)
