"""The layout of a run folder, and the phases of a run. No other module builds a path inside a run folder.

config.toml  purpose.json  versions.json  metrics.jsonl  summary.json  reward.png  split.json  run.lock  run.id
task-list.json  backend/  trackers/  engine.log  crash.txt
rollouts/step-00003.jsonl  rollouts/eval-{00003,before,after}.jsonl  rollouts/{rollouts,eval}.jsonl
checkpoints/step-00010/  checkpoints/best/  adapters/v00010/  trials/  tasks/

Rollouts are recorded by phase: one file per training step and one per evaluation.
"""

from dataclasses import dataclass
from pathlib import Path

EVAL_BEFORE, EVAL_AFTER = "eval-before", "eval-after"
"""The evaluations before the first training step and after the last."""
ROLLOUTS, EVAL = "rollouts", "eval"
"""The only phase of a run that makes rollouts without training, and of an evaluation."""
_NAMED = (EVAL_BEFORE, EVAL_AFTER, ROLLOUTS, EVAL)


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The paths inside one run folder. Building a path does not touch the disk."""

    root: Path
    """The run folder."""

    @property
    def config(self) -> Path:
        """The settings of the run. A folder that has this file holds a run."""
        return self.root / "config.toml"

    @property
    def purpose(self) -> Path:
        """The command that started the run."""
        return self.root / "purpose.json"

    @property
    def versions(self) -> Path:
        """The package versions with which the run started."""
        return self.root / "versions.json"

    @property
    def metrics(self) -> Path:
        """The metrics, one JSON object per training step."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The results of the run."""
        return self.root / "summary.json"

    @property
    def curve(self) -> Path:
        """The plot of the reward curve."""
        return self.root / "reward.png"

    @property
    def crash(self) -> Path:
        """The traceback of an unexpected error."""
        return self.root / "crash.txt"

    @property
    def lock(self) -> Path:
        """The file locked by the process that holds the run."""
        return self.root / "run.lock"

    @property
    def id(self) -> Path:
        """The random part of the run's ID."""
        return self.root / "run.id"

    @property
    def split(self) -> Path:
        """The training and held-out tasks, if the run drew them itself."""
        return self.root / "split.json"

    @property
    def task_list(self) -> Path:
        """The tasks of the run, for worker processes that did not load them."""
        return self.root / "task-list.json"

    @property
    def engine_log(self) -> Path:
        """The output of a server that the run starts."""
        return self.root / "engine.log"

    @property
    def backend(self) -> Path:
        """The files of a training backend such as SLiME."""
        return self.root / "backend"

    @property
    def trackers(self) -> Path:
        """The files of W&B and TensorBoard."""
        return self.root / "trackers"

    @property
    def tracker_id(self) -> Path:
        """The ID under which trackers know the run."""
        return self.trackers / "id"

    @property
    def rollouts(self) -> Path:
        """The recorded rollouts, one file per phase."""
        return self.root / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints, one folder per saved step, and the best adapter."""
        return self.root / "checkpoints"

    @property
    def adapters(self) -> Path:
        """The published weights, one folder per version."""
        return self.root / "adapters"

    @property
    def trials(self) -> Path:
        """Harbor's files of each rollout."""
        return self.root / "trials"

    @property
    def tasks(self) -> Path:
        """The tasks that the run generated."""
        return self.root / "tasks"

    def adapter(self, version: int) -> Path:
        """Return the folder of one published weight version."""
        return self.adapters / f"v{version:05}"

    def rollouts_of(self, phase: str) -> Path:
        """Return the file of a phase's rollouts, one JSON object per line."""
        check_phase(phase)
        return self.rollouts / f"{phase}.jsonl"

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that every run has."""
        return self.rollouts, self.checkpoints, self.adapters, self.trials, self.tasks

    @property
    def contents(self) -> tuple[Path, ...]:
        """Everything that belongs to the run except its lock, in the order in which it is deleted.

        The settings come last: a folder whose deletion was interrupted still holds a run.
        """
        optional = (self.trackers, self.id, self.split, self.task_list, self.backend, self.engine_log)
        files = (self.versions, self.metrics, self.summary, self.curve, self.crash, self.purpose, self.config)
        return (*self.folders, *optional, *files)


def step_phase(step: int) -> str:
    """Return the phase of a training step."""
    return f"step-{step:05}"


def step_of(phase: str) -> int | None:
    """Return the training step of a phase, or None outside training."""
    name, _, number = phase.partition("-")
    return int(number) if name == "step" else None


def eval_phase(version: int) -> str:
    """Return the phase that evaluates this weight version during training."""
    return f"eval-{version:05}"


def eval_of(phase: str) -> int | None:
    """Return the weight version that a phase evaluates during training, or None for any other phase."""
    name, _, number = phase.partition("-")
    return int(number) if name == "eval" and number.isdecimal() else None


def check_phase(phase: str) -> None:
    """Raise ValueError unless this is the name of a phase."""
    step, version = step_of(phase), eval_of(phase)
    if step is not None:
        known = (step_phase(step),)
    else:
        known = _NAMED if version is None else (eval_phase(version),)
    if phase not in known:
        raise ValueError(f"`{phase}` is not a phase of a run")
