"""Dockyard's plug-in for verifiers and Prime-RL, which load it by this name: tasks and agents of Harbor.

verifiers expects one taskset, one harness and one environment; releases before 0.4 also use `load_environment`. The
import starts nothing, because env servers import it in every worker.
"""

from dockyard.backends.prime_rl.plugin.environment import HarborEnvironment, load_environment
from dockyard.backends.prime_rl.plugin.harness import HarborHarness
from dockyard.backends.prime_rl.plugin.taskset import HarborTaskset

__all__ = ["HarborEnvironment", "HarborHarness", "HarborTaskset", "load_environment"]
