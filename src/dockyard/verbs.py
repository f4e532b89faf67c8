"""The work of the verbs that make a run, for the command line and for `import dockyard`.

    settings = request.load()
    work = prepare_rollouts(settings.config, purpose)  # mistakes are errors before there is a run folder
    with open_run(settings, purpose) as run:
        result = work(run)

Harbor and torch are imported when the work is prepared, so that importing this module is fast.
"""

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from dockyard.callbacks import check_callbacks, log_stop
from dockyard.config import RunConfig
from dockyard.engine.quiet_imports import hide_import_warnings
from dockyard.errors import DockyardError, StopRun, UsageError
from dockyard.run_dir.resume import SplitName
from dockyard.run_dir.run import Purpose, ResumedRun, RunDir, read_purpose
from dockyard.settings.load import load, load_run_config
from dockyard.settings.overrides import Overrides, Patch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VerbResult:
    """The outcome of a verb. The details are in the summary in the run folder."""

    text: str = ""
    """The results as text for a terminal."""
    ok: bool = True
    """False if the run has nothing to show, e.g. because every rollout was lost."""


type Work = Callable[[RunDir], VerbResult]
"""Does the work of a verb in an open run folder."""


class RunTraining(Protocol):
    """The training loop."""

    def __call__(self, config: RunConfig, *, run_dir: RunDir) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Which run to start or to resume, and where its settings come from."""

    overrides: Overrides
    toml: Path | None = None
    resume: Path | None = None
    """The folder of a run to resume. None starts a new run."""
    overwrite: bool = False
    """First delete the run that is in the run folder."""
    drop: tuple[str, ...] = ()
    """Settings to treat as not written."""

    def load(self) -> "RunSettings":
        """Read the settings, those of a resumed run from its folder."""
        resumed = ResumedRun.read(self.resume, self.overrides) if self.resume else None
        config = resumed.config if resumed else load_run_config(self.toml, self.overrides, drop=self.drop)
        return RunSettings(config=config, resumed=resumed, overwrite=self.overwrite)

    def for_evaluation(self, purpose: Purpose, *, folder_is_given: bool) -> "RunRequest":
        """Use a folder beside that of the training run, and the training tasks if they are to be evaluated.

        This comes before the settings are checked together: `eval.samples` has no effect without held-out tasks. A
        resumed evaluation has its settings already.
        """
        if self.resume:
            return self
        config = load(RunConfig, self.toml, self.overrides)
        patches: list[Patch] = []
        if not folder_is_given:
            patches.append(Patch({"run_dir": Path(f"{config.run_dir}-eval")}, "dockyard eval"))
        if purpose.split == "train" and config.tasks.source == "folder" and config.tasks.train:
            patches.append(Patch({"tasks.heldout": config.tasks.train}, "--split"))
        return replace(self, overrides=self.overrides.after(*patches))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run, and of a resumed run those that its folder records."""

    config: RunConfig
    resumed: ResumedRun | None
    overwrite: bool

    def open(self, purpose: Purpose) -> RunDir:
        """Create the run folder, or open the one to resume."""
        if self.resumed:
            return RunDir.reopen(self.resumed)
        return RunDir.create(self.config.run_dir, self.config, overwrite=self.overwrite, purpose=purpose)


@contextmanager
def open_run(settings: RunSettings, purpose: Purpose) -> Generator[RunDir]:
    """Hold the run folder during the block. A new run that fails without results is deleted.

    A callback may end the block early with `StopRun`, which is not an error.
    """
    with settings.open(purpose) as run:
        try:
            yield run
        except StopRun as stop:
            log_stop(stop, purpose.verb, run.path)
        except KeyboardInterrupt as stopped:
            stopped.add_note(f"`dockyard {purpose.verb} --resume {run.path}` continues the run")
            raise
        except DockyardError:
            if settings.resumed is None:
                run.discard()
            raise


def purpose_to_resume(path: Path | None, fresh: Purpose) -> Purpose | None:
    """Return the purpose of the run in this folder, which must have been started by the same verb.

    None if no run is resumed, or if the folder holds none.
    """
    recorded = read_purpose(path) if path else None
    if recorded and recorded.verb != fresh.verb:
        hint = f"`dockyard {recorded.verb} --resume {path}` continues it"
        raise UsageError(f"`{path}` was started by `dockyard {recorded.verb}`", hint=hint)
    return recorded


def refuse_with_resume(given: Mapping[str, object], *, resume: str, hint: str) -> None:
    """Raise UsageError if one of these arguments has a value: they contradict a resumed run.

    `resume` is the name of the argument that resumes a run.
    """
    for name, value in given.items():
        if value:
            raise UsageError(f"`{name}` cannot be combined with `{resume}`", hint=hint)


def check_extensions(config: RunConfig, purpose: Purpose, *, trains_here: bool) -> None:
    """Raise UsageError if a class or function of the user's that the verb calls is missing or wrong.

    Every verb calls the callbacks, the engine and the source of the tasks. Only `train` calls `tasks.order` and the
    functions of `grpo`. `trains_here` is False if `train` gives the policy to another process, which checks the latter.
    """
    check_callbacks(config.callbacks)
    if config.engine.is_custom:
        from dockyard.engine.custom import check_engine

        check_engine(config.engine)
    if config.tasks.is_custom:
        from dockyard.tasks.sources import find_source

        find_source(config.tasks.source).check(config.tasks)
    if purpose.verb == "train" and config.tasks.order:
        from dockyard.tasks.order import load_order

        load_order(config.tasks.order)
    if purpose.verb == "train" and trains_here:
        from dockyard.rl.functions import check_functions

        with needs_packages("`grpo.loss`"):
            check_functions(config.grpo, remote=False)


def prepare_training(config: RunConfig, run_training: RunTraining | None = None) -> Work:
    """Import the training loop, unless one is given. With an agent that calls no model, only make rollouts."""
    from dockyard.rollout.agents.wiring import asks_no_model

    if config.tasks.source != "recorded" and asks_no_model(config.agent):
        message = "agent `%s` samples no tokens: its rewards are reported, the update is skipped"
        logger.warning(message, config.agent.name)
        return prepare_rollouts(config, Purpose(verb="train"))
    train = run_training or load_training()

    def work(run: RunDir) -> VerbResult:
        train(run.config, run_dir=run)
        return VerbResult()

    return work


def load_training() -> RunTraining:
    """Import the training loop. Raise DockyardError if a package that it needs is not installed."""
    with needs_packages("training"):
        from dockyard.trainer import learner
        from dockyard.trainer.run import run_training

        del learner
    return run_training


@contextmanager
def needs_packages(what: str) -> Generator[None]:
    """Raise DockyardError if the imports in the block need a package that is not installed."""
    hide_import_warnings()
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("dockyard"):
            raise
        message = f"{what} needs `{error.name}`, which is not installed"
        raise DockyardError(message, hint="`pip install 'dockyard[train]'`") from error


def prepare_rollouts(config: RunConfig, purpose: Purpose) -> Work:
    """Check the agent, the environment, the model and the training tasks."""
    from dockyard.collect.harbor_cli import check_limits
    from dockyard.collect.rollout import collect_rollouts
    from dockyard.collect.run_plan import prepare

    if purpose.harbor_cli:
        check_limits(config.rollout)
    prepared = prepare(config, split="train")

    def work(run: RunDir) -> VerbResult:
        summary = collect_rollouts(run, prepared, num_tasks=purpose.num_tasks, harbor_cli=purpose.harbor_cli)
        return VerbResult(summary.table())

    return work


def prepare_evaluation(config: RunConfig, purpose: Purpose) -> Work:
    """Check the agent, the environment, the model and the tasks of the split."""
    from dockyard.collect.evaluate import evaluate
    from dockyard.collect.run_plan import prepare

    prepared = prepare(config, split=purpose.split, adapter=purpose.adapter)

    def work(run: RunDir) -> VerbResult:
        report = evaluate(run, prepared, split=purpose.split)
        return VerbResult(report.table(), ok=report.scores is not None)

    return work


def evaluation_purpose(split: SplitName, adapter: Path | None) -> Purpose:
    """Return the purpose of an evaluation. Raise UsageError unless the folder `adapter` holds a LoRA adapter."""
    if adapter:
        _check_adapter(adapter)
    return Purpose(verb="eval", split=split, adapter=adapter and adapter.absolute())


def _check_adapter(adapter: Path) -> None:
    if (adapter / "adapter_config.json").is_file():
        return
    hint = "name a folder that PEFT's `save_pretrained` wrote, e.g. RUN_DIR/adapters/v00050"
    if (adapter / "config.json").is_file():
        hint = "it is a full model: `dockyard export RUN_DIR --output DIR`, then `dockyard eval --model.name DIR`"
    raise UsageError(f"`{adapter}` has no `adapter_config.json`", hint=hint)
