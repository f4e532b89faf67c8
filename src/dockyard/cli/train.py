"""`dockyard train`."""

import argparse
from pathlib import Path
from typing import Protocol

from dockyard.cli import rollout
from dockyard.cli.run_file import AddParser, Flag, RunArguments, Work, add_run_verb, carry_out, purpose_of
from dockyard.cli.terminal import say
from dockyard.config import RunConfig, TasksConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.run import Purpose, RunDir
from dockyard.settings.load import READ_BY_SOURCE

FLAGS = (
    Flag("--skip-training", "make rollouts only, as `dockyard rollout` does"),
    Flag(
        "--from-job",
        "learn from recorded rollouts: a Harbor job, a run of ours or a file of samples",
        {"metavar": "PATH", "type": Path},
    ),
    Flag("--epochs", "short for `--tasks.passes N`", {"metavar": "N", "type": rollout.positive}),
    *rollout.FLAGS,
)


class RunTraining(Protocol):
    """The training loop, as the command line calls it."""

    def __call__(self, config: RunConfig, *, run_dir: RunDir) -> object: ...


def add(add_parser: AddParser) -> None:
    """Describe the verb."""
    add_run_verb(add_parser, "train", "Train a policy on tasks.", FLAGS)


def act(arguments: argparse.Namespace) -> int:
    """Train, or only make rollouts."""
    if arguments.skip_training:
        if arguments.from_job:
            hint = "`dockyard convert` reads a job without training"
            raise UsageError("`--from-job` does not go with `--skip-training`", hint=hint)
        return rollout.act(arguments)
    rollout.refuse(arguments, "goes with `--skip-training`")
    given: RunTraining | None = arguments.run_training
    purpose = purpose_of(arguments, Purpose(verb="train"), ())
    return carry_out(RunArguments.of(arguments, *_more(arguments)), purpose, lambda config: _work(config, given))


def _more(arguments: argparse.Namespace) -> list[str]:
    """Options that are settings under another name."""
    job: Path | None = arguments.from_job
    recorded = [*_other_tasks_forgotten(), "--tasks.source=recorded", f"--tasks.dataset={job}"] if job else []
    passes = [f"--tasks.passes={arguments.epochs}"] if arguments.epochs else []
    return [*recorded, *passes, *([f"--steps={RunConfig().steps}"] if recorded or passes else [])]


def _other_tasks_forgotten() -> list[str]:
    """What a run file says of its tasks does not count when rollouts are there already."""
    defaults = TasksConfig().model_dump(exclude={"source", *READ_BY_SOURCE["recorded"]})
    texts = {None: "none", (): "[]"}
    return [
        f"--tasks.{name}={value if isinstance(value, dict) else texts.get(value, value)}"
        for name, value in defaults.items()
    ]


def _work(config: RunConfig, given: RunTraining | None) -> Work:
    if config.tasks.source != "recorded" and _asks_no_model(config):
        say(f"agent `{config.agent.name}` samples no tokens: its rewards are reported, the update is skipped")
        return rollout.work(config, Purpose(verb="train"))
    run_training = given or _load_training()

    def work(run: RunDir) -> int:
        run_training(run.config, run_dir=run)
        return 0

    return work


def _asks_no_model(config: RunConfig) -> bool:
    from dockyard.rollout.agents.rows import asks_no_model

    return asks_no_model(config.agent)


def _load_training() -> RunTraining:
    """Before the run's folder is made: without torch there is nothing to begin."""
    try:
        from dockyard.trainer import learner
        from dockyard.trainer.run import run_training

        del learner
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("dockyard"):
            raise
        raise DockyardError(
            f"training needs `{error.name}`, which is not installed", hint="`pip install 'dockyard[train]'`"
        ) from error
    return run_training
