"""Dockyard trains coding agents by reinforcement learning on Harbor tasks.

Importing this package has no effects and loads no torch.
"""

__version__ = "0.1.0"
