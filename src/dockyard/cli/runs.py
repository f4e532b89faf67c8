"""`dockyard train`, `dockyard rollout` and `dockyard eval`, and what they share with other verbs that make a run.

These are thin: `dockyard.verbs` does the work.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dockyard.cli.args import DEBUG, Flag, Given, Verb, positive
from dockyard.cli.terminal import EXIT_STOPPED, print_data, say
from dockyard.config import RunConfig, TasksConfig
from dockyard.errors import UsageError
from dockyard.process import stopped_by_signals
from dockyard.run_dir.run import Purpose
from dockyard.settings.overrides import Overrides, Patch
from dockyard.settings.rules import READ_BY_SOURCE
from dockyard.settings.text import to_toml
from dockyard.verbs import (
    RunRequest,
    RunSettings,
    VerbResult,
    Work,
    check_extensions,
    evaluation_purpose,
    open_run,
    prepare_evaluation,
    prepare_rollouts,
    prepare_training,
    purpose_to_resume,
    refuse_with_resume,
)

RUN_FLAGS = (
    Flag("--dry-run", "print the resolved settings as TOML, and do nothing else"),
    Flag("--json", "print JSON: with `--dry-run` the settings, else the summary of the run"),
    Flag("--resume", "continue the run in this folder with its own settings", {"metavar": "RUN_DIR", "type": Path}),
    Flag("--overwrite", "delete the run that is already in the run folder"),
    DEBUG,
)
RUN_FILE = Flag("toml", "a TOML file with settings", {"metavar": "RUN.toml", "nargs": "?", "type": Path})
AGENT = {"--agent": "agent.name"}
_EPOCHS = "--epochs"
_ROLLOUT_FLAGS = (
    Flag("--num-tasks", "attempt only the first N training tasks", {"metavar": "N", "type": positive}),
    Flag("--harbor-cli", "run each rollout as a `harbor run` command instead of through Harbor's Python API"),
)
_TRAIN_FLAGS = (
    Flag("--skip-training", "only run rollouts, as `dockyard rollout` does"),
    Flag(
        "--from-job",
        "train on recorded rollouts: a Harbor job, a run folder or a file of samples",
        {"metavar": "PATH", "type": Path},
    ),
    *_ROLLOUT_FLAGS,
)
_EVAL_FLAGS = (
    Flag("--split", "which tasks: `heldout` (default) or `train`", {"choices": ("heldout", "train")}),
    Flag("--adapter", "a trained LoRA adapter to evaluate", {"metavar": "DIR", "type": Path}),
)


def run_verb(
    name: str, about: str, act: Callable[[Given], int], flags: Sequence[Flag], aliases: dict[str, str] | None = None
) -> Verb:
    """A verb that takes a RUN.toml."""
    return Verb(
        name=name,
        about=f"{about} Relative paths are relative to the current directory.",
        act=act,
        usage="[RUN.toml] [--section.key VALUE ...] [options]",
        flags=(RUN_FILE, *flags, *RUN_FLAGS),
        settings=RunConfig,
        aliases=AGENT | (aliases or {}),
    )


def purpose_of(given: Given, fresh: Purpose, flags: Sequence[Flag]) -> Purpose:
    """The purpose of the run. A resumed run keeps its own, so `flags` are refused."""
    recorded = purpose_to_resume(given.flags.resume, fresh)
    if recorded is None:
        return fresh
    values = {flag.name: vars(given.flags)[flag.key] for flag in flags}
    refuse_with_resume(values, resume="--resume", hint="a resumed run keeps the flags that it was started with")
    return recorded


def request_of(given: Given, toml: Path | None) -> RunRequest:
    """The run that the flags ask for. Flags that contradict `--resume` are refused."""
    flags = given.flags
    if flags.resume:
        contradictions = {str(toml): toml, "--overwrite": flags.overwrite}
        hint = "a resumed run has its own settings and folder"
        refuse_with_resume(contradictions, resume="--resume", hint=hint)
    return RunRequest(toml=toml, overrides=given.overrides, resume=flags.resume, overwrite=flags.overwrite)


def carry_out(
    given: Given, settings: RunSettings, purpose: Purpose, prepare: Callable[[RunConfig, Purpose], Work]
) -> int:
    """Prepare the work, open the run folder, do the work, and show the result. Return the exit code."""
    config = settings.config
    check_extensions(config, purpose, trains_here=given.run_training is None)
    if given.flags.dry_run:
        print_data(config.model_dump_json(indent=2) + "\n" if given.flags.json else to_toml(config))
        return 0
    work = prepare(config, purpose)
    result = VerbResult()  # of a run that a callback stops
    with open_run(settings, purpose) as run:
        try:
            with stopped_by_signals():
                result = work(run)
        except KeyboardInterrupt:
            say(f"stopped; `dockyard {purpose.verb} --resume {short(run.path)}` continues")
            return EXIT_STOPPED
    if result.text:
        say(f"\n{result.text}")
    if given.flags.json:
        print_data(json.dumps(run.read_summary(), indent=2) + "\n")
    return 0 if result.ok else 1


def short(path: Path) -> Path:
    """The path relative to the current directory, if it is inside it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _train(given: Given) -> int:
    flags = given.flags
    given = replace(given, overrides=_training_overrides(given))
    if flags.skip_training:
        if flags.from_job:
            hint = "`dockyard convert` reads a job without training"
            raise UsageError("`--from-job` cannot be combined with `--skip-training`", hint=hint)
        return _rollout(given)
    for value, name in ((flags.num_tasks, "--num-tasks"), (flags.harbor_cli, "--harbor-cli")):
        if value:
            raise UsageError(f"`{name}` needs `--skip-training`", hint="`dockyard rollout` runs rollouts only")
    purpose = purpose_of(given, Purpose(verb="train"), ())
    settings = request_of(given, flags.toml).load()
    return carry_out(given, settings, purpose, lambda config, _: prepare_training(config, given.run_training))


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


def _rollout(given: Given) -> int:
    flags = given.flags
    fresh = Purpose(verb="rollout", num_tasks=flags.num_tasks, harbor_cli=flags.harbor_cli)
    purpose = purpose_of(given, fresh, _ROLLOUT_FLAGS)
    return carry_out(given, request_of(given, flags.toml).load(), purpose, prepare_rollouts)


def _eval(given: Given) -> int:
    flags = given.flags
    fresh = evaluation_purpose(flags.split or "heldout", flags.adapter)
    purpose = purpose_of(given, fresh, _EVAL_FLAGS)
    request = request_of(given, flags.toml)
    settings = request.for_evaluation(purpose, folder_is_given=given.overrides.sets("run_dir")).load()
    return carry_out(given, settings, purpose, prepare_evaluation)


VERBS = (
    run_verb("train", "Train a policy on tasks.", _train, _TRAIN_FLAGS, {_EPOCHS: "tasks.passes"}),
    run_verb(
        "rollout",
        "Run an agent on tasks without training. Each training task is attempted `grpo.group_size` times.",
        _rollout,
        _ROLLOUT_FLAGS,
    ),
    run_verb(
        "eval",
        "Measure a policy: pass@1, pass@k and mean reward, with 95 % confidence intervals. Each held-out task is "
        "attempted `eval.samples` times. Without `--run_dir`, the run folder is `run_dir` of the settings with `-eval` "
        "appended. The exit code is 1 when every rollout was lost.",
        _eval,
        _EVAL_FLAGS,
    ),
)
