"""The work of `train`, `rollout` and `eval` without a command line.

`prepare_*` checks the settings and returns the work, so that errors appear before a run folder is made. `carry_out`
opens the folder and does the work.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dockyard.collect.evaluate import evaluate
from dockyard.collect.harbor_cli import check_limits
from dockyard.collect.rollout import collect_rollouts
from dockyard.collect.run_order import prepare
from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.rollout.agents.wiring import asks_no_model
from dockyard.run_dir.run import Purpose, ResumedRun, RunDir, read_purpose

logger = logging.getLogger(__name__)

type Work = Callable[[RunDir], object]
"""Works in an open run folder and leaves a summary there."""


class RunTraining(Protocol):
    """The training loop."""

    def __call__(self, config: RunConfig, *, run_dir: RunDir) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A run to start or to continue."""

    config: RunConfig
    purpose: Purpose
    resumed: ResumedRun | None = None
    """The settings in the folder of a run to continue; None starts a run."""
    overwrite: bool = False
    """Delete the run that is in the folder first."""

    def open(self) -> RunDir:
        if self.resumed:
            return RunDir.reopen(self.resumed)
        return RunDir.create(self.config.run_dir, self.config, overwrite=self.overwrite, purpose=self.purpose)


def carry_out(request: RunRequest, work: Work) -> Path:
    """Do the work in the run folder, and return the folder. A new run that fails without results is deleted."""
    with request.open() as run:
        try:
            work(run)
        except KeyboardInterrupt as stopped:
            stopped.add_note(f"`dockyard {request.purpose.verb} --resume {run.path}` continues the run")
            raise
        except DockyardError:
            if request.resumed is None:
                run.discard()
            raise
        return run.path


def prepare_work(config: RunConfig, purpose: Purpose) -> Work:
    """Check what can be checked before the run folder is made, and return the work of a verb."""
    match purpose.verb:
        case "train":
            return prepare_training(config)
        case "rollout":
            return prepare_rollouts(config, purpose)
        case "eval":
            return prepare_evaluation(config, purpose)
        case other:
            raise ValueError(f"`{other}` cannot be called from Python")


def prepare_training(config: RunConfig) -> Work:
    """Import the training loop. With an agent that calls no model, only make rollouts."""
    if config.tasks.source != "recorded" and asks_no_model(config.agent):
        logger.warning("agent `%s` samples no tokens: rewards are reported, nothing is trained", config.agent.name)
        return prepare_rollouts(config, Purpose(verb="train"))
    run_training = load_training()
    return lambda run: run_training(run.config, run_dir=run)


def load_training() -> RunTraining:
    """Import the training loop. Raise DockyardError if a package that it needs is not installed."""
    try:
        from dockyard.trainer import learner
        from dockyard.trainer.run import run_training

        del learner
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("dockyard"):
            raise
        message = f"training needs `{error.name}`, which is not installed"
        raise DockyardError(message, hint="`pip install 'dockyard[train]'`") from error
    return run_training


def prepare_rollouts(config: RunConfig, purpose: Purpose) -> Work:
    """Check the agent, the environment, the model and the training tasks."""
    if purpose.harbor_cli:
        check_limits(config.rollout)
    prepared = prepare(config, split="train")
    return lambda run: collect_rollouts(run, prepared, num_tasks=purpose.num_tasks, harbor_cli=purpose.harbor_cli)


def prepare_evaluation(config: RunConfig, purpose: Purpose) -> Work:
    """Check the adapter, the agent, the environment, the model and the tasks of the split."""
    if purpose.adapter:
        check_adapter(purpose.adapter)
    prepared = prepare(config, split=purpose.split, adapter=purpose.adapter)
    return lambda run: evaluate(run, prepared, split=purpose.split)


def check_adapter(adapter: Path) -> None:
    """Raise UsageError unless the folder holds a LoRA adapter."""
    if (adapter / "adapter_config.json").is_file():
        return
    hint = "an adapter folder is what PEFT's `save_pretrained` writes, e.g. RUN_DIR/adapters/v00050"
    if (adapter / "config.json").is_file():
        hint = "it is a whole model: `dockyard export RUN_DIR --output DIR`, then `dockyard eval --model.name DIR`"
    raise UsageError(f"`{adapter}` has no `adapter_config.json`", hint=hint)


def purpose_to_resume(path: Path, fresh: Purpose) -> Purpose:
    """Return the purpose of the run in this folder, or `fresh` if it holds none. It must have the same verb."""
    recorded = read_purpose(path)
    if recorded is None:
        return fresh
    if recorded.verb != fresh.verb:
        hint = f"`dockyard {recorded.verb} --resume {path}` continues it"
        raise UsageError(f"`{path}` was begun by `dockyard {recorded.verb}`", hint=hint)
    return recorded
