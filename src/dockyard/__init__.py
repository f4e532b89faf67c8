"""Dockyard trains coding agents by reinforcement learning on Harbor tasks.

Importing this package has no effects and loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dockyard.collect.api import HarborConfig, HarborRolloutGenerator
    from dockyard.convert import HarborTrajectoryConverter

__version__ = "0.1.0"
__all__ = ["HarborConfig", "HarborRolloutGenerator", "HarborTrajectoryConverter", "__version__"]

_WHERE = {
    "HarborConfig": "dockyard.collect.api",
    "HarborRolloutGenerator": "dockyard.collect.api",
    "HarborTrajectoryConverter": "dockyard.convert",
}
"""Loaded when they are asked for: Harbor takes a second to import."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module `dockyard` has no attribute `{name}`")
    return getattr(import_module(_WHERE[name]), name)
