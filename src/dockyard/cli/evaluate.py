"""`dockyard eval`."""

import argparse
from pathlib import Path

from dockyard.cli.run_file import AddParser, Flag, RunArguments, Work, add_run_verb, carry_out, purpose_of
from dockyard.cli.terminal import say
from dockyard.config import RunConfig
from dockyard.errors import UsageError
from dockyard.run_dir.run import Purpose, RunDir
from dockyard.settings.load import load

FLAGS = (
    Flag("--split", "which tasks: `heldout` (default) or `train`", {"choices": ("heldout", "train")}),
    Flag("--adapter", "a trained LoRA adapter to evaluate the model with", {"metavar": "DIR", "type": Path}),
)


def add(add_parser: AddParser) -> None:
    """Describe the verb."""
    about = (
        "Measure a policy: pass@1, pass@k and mean reward, with 95 % confidence intervals. "
        "Each held-out task is attempted `eval.samples` times. Without `--run_dir`, the folder is that of the "
        "settings with `-eval` at its end."
    )
    add_run_verb(add_parser, "eval", about, FLAGS)


def act(arguments: argparse.Namespace) -> int:
    """Make the rollouts, and print the scores. Exit code 1 when every rollout was lost."""
    adapter: Path | None = arguments.adapter
    if adapter and not (adapter / "adapter_config.json").is_file():
        hint = "an adapter folder is what PEFT's `save_pretrained` writes, e.g. RUN_DIR/adapters/v00050"
        if (adapter / "config.json").is_file():
            hint = "it is a whole model: `dockyard export RUN_DIR --output DIR`, then `dockyard eval --model.name DIR`"
        raise UsageError(f"`{adapter}` has no `adapter_config.json`", hint=hint)
    fresh = Purpose(verb="eval", split=arguments.split or "heldout", adapter=adapter and adapter.absolute())
    purpose = purpose_of(arguments, fresh, FLAGS)
    more = () if arguments.resume else _more_overrides(arguments, purpose)
    return carry_out(RunArguments.of(arguments, *more), purpose, lambda config: _work(config, purpose))


def _more_overrides(arguments: argparse.Namespace, purpose: Purpose) -> list[str]:
    """A folder beside the training run's, and the training tasks in place of the held-out ones if they were asked for.

    Taken before the settings are checked: `eval.samples` without held-out tasks would be refused as without effect.
    """
    config = load(RunConfig, arguments.toml, arguments.overrides)
    found: list[str] = []
    if not any(word.partition("=")[0] == "--run_dir" for word in arguments.overrides):
        found.append(f"--run_dir={config.run_dir}-eval")
    if purpose.split == "train" and config.tasks.source == "folder" and config.tasks.train:
        found.append(f"--tasks.heldout={config.tasks.train}")
    return found


def _work(config: RunConfig, purpose: Purpose) -> Work:
    from dockyard.collect.evaluate import evaluate
    from dockyard.collect.run_order import prepare

    prepared = prepare(config, split=purpose.split, adapter=purpose.adapter)

    def work(run: RunDir) -> int:
        report = evaluate(run, prepared, split=purpose.split)
        say(f"\n{report.table()}")
        return 0 if report.scores else 1

    return work
