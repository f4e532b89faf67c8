"""`dockyard train`."""

import argparse
from typing import Protocol

from dockyard.cli import rollout
from dockyard.cli.run_file import AddParser, Flag, RunArguments, Work, add_run_verb, carry_out, purpose_of
from dockyard.config import RunConfig
from dockyard.errors import DockyardError
from dockyard.run_dir import Purpose, RunDir

FLAGS = (Flag("--skip-training", "make rollouts only, as `dockyard rollout` does"), *rollout.FLAGS)


class RunTraining(Protocol):
    """The training loop, as the command line calls it."""

    def __call__(self, config: RunConfig, *, run_dir: RunDir) -> object: ...


def add(add_parser: AddParser) -> None:
    """Describe the verb."""
    add_run_verb(add_parser, "train", "Train a policy on tasks.", FLAGS)


def act(arguments: argparse.Namespace) -> int:
    """Train, or only make rollouts."""
    if arguments.skip_training:
        return rollout.act(arguments)
    rollout.refuse(arguments, "goes with `--skip-training`")
    given: RunTraining | None = arguments.run_training
    purpose = purpose_of(arguments, Purpose(verb="train"), ())
    return carry_out(RunArguments.of(arguments), purpose, lambda _: _work(given))


def _work(given: RunTraining | None) -> Work:
    run_training = given or _load_training()

    def work(run: RunDir) -> int:
        run_training(run.config, run_dir=run)
        return 0

    return work


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
