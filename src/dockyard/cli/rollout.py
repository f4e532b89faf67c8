"""`dockyard rollout`, which is also `dockyard train --skip-training`."""

import argparse

from dockyard.cli.run_file import AddParser, Flag, RunArguments, Work, add_run_verb, carry_out, purpose_of
from dockyard.cli.terminal import say
from dockyard.config import RunConfig
from dockyard.errors import UsageError
from dockyard.run_dir.run import Purpose, RunDir


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is no whole number from 1")
    return int(text)


FLAGS = (
    Flag("--num-tasks", "attempt only the first N training tasks", {"metavar": "N", "type": positive}),
    Flag("--harbor-cli", "make each rollout by a `harbor run` command instead of Harbor's Python API"),
)


def add(add_parser: AddParser) -> None:
    """Describe the verb."""
    about = "Make rollouts without training. Each training task is attempted `grpo.group_size` times."
    add_run_verb(add_parser, "rollout", about, FLAGS)


def act(arguments: argparse.Namespace) -> int:
    """Make the rollouts, and print what they came to."""
    fresh = Purpose(verb="rollout", num_tasks=arguments.num_tasks, harbor_cli=arguments.harbor_cli)
    purpose = purpose_of(arguments, fresh, FLAGS)
    return carry_out(RunArguments.of(arguments), purpose, lambda config: work(config, purpose))


def refuse(arguments: argparse.Namespace, why: str) -> None:
    """For a verb that shares these options in some cases only."""
    for given, name in ((arguments.num_tasks, "--num-tasks"), (arguments.harbor_cli, "--harbor-cli")):
        if given:
            raise UsageError(f"`{name}` {why}", hint="`dockyard rollout` makes rollouts without training")


def work(config: RunConfig, purpose: Purpose) -> Work:
    """Rollouts of the training tasks, and a table of what they came to."""
    from dockyard.collect.harbor_cli import check_limits
    from dockyard.collect.rollout import collect_rollouts
    from dockyard.collect.run_order import prepare

    if purpose.harbor_cli:
        check_limits(config.rollout)
    prepared = prepare(config, split="train")

    def make(run: RunDir) -> int:
        summary = collect_rollouts(run, prepared, num_tasks=purpose.num_tasks, harbor_cli=purpose.harbor_cli)
        say(f"\n{summary.table()}")
        return 0

    return make
