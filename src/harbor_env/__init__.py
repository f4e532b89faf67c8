"""The name by which verifiers, and so Prime-RL, load Dockyard's plug-in: tasks and agents of Harbor.

verifiers looks here for one taskset, one harness and one environment; its releases before 0.4 also for
`load_environment`. Importing it starts nothing: env servers do so in every worker.
"""

from dockyard.backends.prime_rl.plugin.environment import HarborEnvironment, load_environment
from dockyard.backends.prime_rl.plugin.harness import HarborHarness
from dockyard.backends.prime_rl.plugin.taskset import HarborTaskset

__all__ = ["HarborEnvironment", "HarborHarness", "HarborTaskset", "load_environment"]
