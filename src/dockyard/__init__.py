"""Dockyard trains coding agents by reinforcement learning on Harbor tasks.

    import dockyard

    run = dockyard.train("run.toml", steps=20, trainer={"lr": 1e-5})
    run.metrics()[["step", "reward/mean"]]
    dockyard.evaluate("run.toml", adapter=run.adapter).summary["scores"]

Names are imported when they are first used, so `import dockyard` loads neither torch nor Harbor.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dockyard.api import convert_job, evaluate, load_run, run_rollouts, train
    from dockyard.callbacks import Callbacks
    from dockyard.collect.api import HarborConfig, HarborRolloutGenerator
    from dockyard.config import RunConfig
    from dockyard.convert import HarborTrajectoryConverter
    from dockyard.errors import DockyardError, StopRun
    from dockyard.rl.reward import FinishedRollout
    from dockyard.run_dir.reader import Run
    from dockyard.types import Group, Rollout, Segment, Task

__version__ = "0.1.0"
__all__ = [
    "Callbacks",
    "DockyardError",
    "FinishedRollout",
    "Group",
    "HarborConfig",
    "HarborRolloutGenerator",
    "HarborTrajectoryConverter",
    "Rollout",
    "Run",
    "RunConfig",
    "Segment",
    "StopRun",
    "Task",
    "__version__",
    "convert_job",
    "evaluate",
    "load_run",
    "run_rollouts",
    "train",
]

_MODULES = {
    "dockyard.api": ("convert_job", "evaluate", "load_run", "run_rollouts", "train"),
    "dockyard.callbacks": ("Callbacks",),
    "dockyard.collect.api": ("HarborConfig", "HarborRolloutGenerator"),
    "dockyard.config": ("RunConfig",),
    "dockyard.convert": ("HarborTrajectoryConverter",),
    "dockyard.errors": ("DockyardError", "StopRun"),
    "dockyard.rl.reward": ("FinishedRollout",),
    "dockyard.run_dir.reader": ("Run",),
    "dockyard.types": ("Group", "Rollout", "Segment", "Task"),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module `dockyard` has no attribute `{name}`")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
