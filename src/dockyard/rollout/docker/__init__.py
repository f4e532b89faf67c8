"""The `docker` environment: Harbor's own, with fast starts and stops, a seal, and nothing left behind.

An import path instead of the class, so that importing this costs nothing of Harbor's.
"""

from dockyard.rollout.docker.site import ENVIRONMENT, docker_site

__all__ = ["ENVIRONMENT", "docker_site"]
