"""The `docker` environment: Harbor's own, with faster starts and stops, a seal, and complete removal.

It exports an import path instead of the class, so that importing this package does not import Harbor.
"""

from dockyard.rollout.docker.site import ENVIRONMENT, docker_site

__all__ = ["ENVIRONMENT", "docker_site"]
