"""`dockyard train`, `dockyard rollout` and `dockyard eval`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dockyard.cli.args import Flag, Given, positive
from dockyard.cli.run_file import RunArguments, Work, carry_out, purpose_of, run_verb
from dockyard.cli.terminal import say
from dockyard.config import RunConfig, TasksConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.run import Purpose, RunDir
from dockyard.settings.load import load
from dockyard.settings.overrides import Overrides, Patch
from dockyard.settings.rules import READ_BY_SOURCE

if TYPE_CHECKING:
    from dockyard.verbs import RunTraining

ROLLOUT_FLAGS = (
    Flag("--num-tasks", "attempt only the first N training tasks", {"metavar": "N", "type": positive}),
    Flag("--harbor-cli", "run each rollout as a `harbor run` command instead of through Harbor's Python API"),
)
TRAIN_FLAGS = (
    Flag("--skip-training", "only run rollouts, as `dockyard rollout` does"),
    Flag(
        "--from-job",
        "train on recorded rollouts: a Harbor job, a run folder or a file of samples",
        {"metavar": "PATH", "type": Path},
    ),
    *ROLLOUT_FLAGS,
)
EVAL_FLAGS = (
    Flag("--split", "which tasks: `heldout` (default) or `train`", {"choices": ("heldout", "train")}),
    Flag("--adapter", "a trained LoRA adapter to evaluate", {"metavar": "DIR", "type": Path}),
)
_EPOCHS = "--epochs"


def _train(given: Given) -> int:
    flags = given.flags
    if flags.skip_training:
        if flags.from_job:
            hint = "`dockyard convert` reads a job without training"
            raise UsageError("`--from-job` cannot be combined with `--skip-training`", hint=hint)
        return _rollout(replace(given, overrides=_training_overrides(given)))
    for value, name in ((flags.num_tasks, "--num-tasks"), (flags.harbor_cli, "--harbor-cli")):
        if value:
            raise UsageError(f"`{name}` needs `--skip-training`", hint="`dockyard rollout` runs rollouts only")
    purpose = purpose_of(given, Purpose(verb="train"), ())
    arguments = RunArguments.of(given, _training_overrides(given), flags.toml)
    return carry_out(arguments, purpose, lambda config: _training(config, given.run_training))


def _training_overrides(given: Given) -> Overrides:
    """`--from-job` replaces the tasks of the file. Where passes are counted, `steps` of the file is not read."""
    job: Path | None = given.flags.from_job
    overrides = given.overrides
    if job or overrides.has_flag(_EPOCHS):
        overrides = overrides.before(Patch({"steps": RunConfig().steps}, "--from-job" if job else _EPOCHS))
    if not job:
        return overrides
    defaults = TasksConfig().model_dump(exclude={"source", *READ_BY_SOURCE["recorded"]})
    others = {f"tasks.{name}": value for name, value in defaults.items()}
    return overrides.after(Patch({**others, "tasks.source": "recorded", "tasks.dataset": str(job)}, "--from-job"))


def _training(config: RunConfig, given: "RunTraining | None") -> Work:
    if config.tasks.source != "recorded" and _asks_no_model(config):
        say(f"agent `{config.agent.name}` samples no tokens: its rewards are reported, the update is skipped")
        return _rollouts(config, Purpose(verb="train"))
    run_training = given or _load_training()

    def work(run: RunDir) -> int:
        run_training(run.config, run_dir=run)
        return 0

    return work


def _asks_no_model(config: RunConfig) -> bool:
    from dockyard.rollout.agents.wiring import asks_no_model

    return asks_no_model(config.agent)


def _load_training() -> "RunTraining":
    """Import the training loop before the run folder is created, in case torch is not installed."""
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


def _rollout(given: Given) -> int:
    flags = given.flags
    fresh = Purpose(verb="rollout", num_tasks=flags.num_tasks, harbor_cli=flags.harbor_cli)
    purpose = purpose_of(given, fresh, ROLLOUT_FLAGS)
    return carry_out(RunArguments.of(given, toml=flags.toml), purpose, lambda config: _rollouts(config, purpose))


def _rollouts(config: RunConfig, purpose: Purpose) -> Work:
    from dockyard.collect.harbor_cli import check_limits
    from dockyard.collect.rollout import collect_rollouts
    from dockyard.collect.run_order import prepare

    if purpose.harbor_cli:
        check_limits(config.rollout)
    prepared = prepare(config, split="train")

    def work(run: RunDir) -> int:
        summary = collect_rollouts(run, prepared, num_tasks=purpose.num_tasks, harbor_cli=purpose.harbor_cli)
        say(f"\n{summary.table()}")
        return 0

    return work


def _eval(given: Given) -> int:
    flags = given.flags
    adapter: Path | None = flags.adapter
    if adapter and not (adapter / "adapter_config.json").is_file():
        hint = "name a folder that PEFT's `save_pretrained` wrote, e.g. RUN_DIR/adapters/v00050"
        if (adapter / "config.json").is_file():
            hint = "it is a full model: `dockyard export RUN_DIR --output DIR`, then `dockyard eval --model.name DIR`"
        raise UsageError(f"`{adapter}` has no `adapter_config.json`", hint=hint)
    fresh = Purpose(verb="eval", split=flags.split or "heldout", adapter=adapter and adapter.absolute())
    purpose = purpose_of(given, fresh, EVAL_FLAGS)
    overrides = given.overrides if flags.resume else _eval_overrides(given, purpose)
    return carry_out(
        RunArguments.of(given, overrides, flags.toml), purpose, lambda config: _evaluation(config, purpose)
    )


def _eval_overrides(given: Given, purpose: Purpose) -> Overrides:
    """Use another folder than the training run, and with `--split train` its training tasks as held-out tasks.

    This comes before the settings are checked together: `eval.samples` has no effect without held-out tasks.
    """
    config = load(RunConfig, given.flags.toml, given.overrides)
    overrides = given.overrides.before(Patch({"run_dir": Path(f"{config.run_dir}-eval")}, "dockyard eval"))
    if purpose.split == "train" and config.tasks.source == "folder" and config.tasks.train:
        return overrides.after(Patch({"tasks.heldout": config.tasks.train}, "--split"))
    return overrides


def _evaluation(config: RunConfig, purpose: Purpose) -> Work:
    from dockyard.collect.evaluate import evaluate
    from dockyard.collect.run_order import prepare

    prepared = prepare(config, split=purpose.split, adapter=purpose.adapter)

    def work(run: RunDir) -> int:
        report = evaluate(run, prepared, split=purpose.split)
        say(f"\n{report.table()}")
        return 0 if report.scores else 1

    return work


VERBS = (
    run_verb("train", "Train a policy on tasks.", _train, TRAIN_FLAGS, {_EPOCHS: "tasks.passes"}),
    run_verb(
        "rollout",
        "Run an agent on tasks without training. Each training task is attempted `grpo.group_size` times.",
        _rollout,
        ROLLOUT_FLAGS,
    ),
    run_verb(
        "eval",
        "Measure a policy: pass@1, pass@k and mean reward, with 95 % confidence intervals. Each held-out task is "
        "attempted `eval.samples` times. Without `--run_dir`, the run folder is `run_dir` of the settings with `-eval` "
        "appended. The exit code is 1 when every rollout was lost.",
        _eval,
        EVAL_FLAGS,
    ),
)
