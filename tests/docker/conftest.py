"""Every test here needs an engine."""

import uuid
from collections.abc import AsyncGenerator, Iterator

import pytest
from docker_engine import BASE, docker, use_engine
from docker_environment import NAME

from dockyard.config import EnvironmentConfig
from dockyard.rollout.docker.images import TASK_LABEL
from dockyard.rollout.docker.site import docker_site
from dockyard.rollout.environments import Site


@pytest.fixture(autouse=True, scope="session")
def engine() -> None:
    use_engine()


@pytest.fixture
async def site() -> AsyncGenerator[Site]:
    async with docker_site(EnvironmentConfig(type="docker"), inside=True) as site:
        yield site


@pytest.fixture
def dockerfile() -> Iterator[str]:
    """An image that was not built before."""
    mark = uuid.uuid4().hex
    yield f"FROM {BASE}\nRUN echo {mark} >/mark\n"
    for image in docker("image", "ls", "--quiet", "--filter", f"label={TASK_LABEL}={NAME}").split():
        docker("image", "rm", "--force", image)
