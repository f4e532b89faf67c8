"""Task images: built or pulled once, shared by all trials, and never removed by a trial."""

# pyright: reportMissingTypeStubs=false

import asyncio
import json
import re
from collections.abc import Coroutine
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from harbor.environments.base import SandboxBuildFailedError

from dockyard.rollout.blame import ImageMissingError
from dockyard.rollout.docker.docker_cli import DockerError, ask, docker, short

TASK_LABEL = "dockyard.task"
"""`docker image prune --all --filter label=dockyard.task` frees the disk space."""
MAX_TRIES = 3
_SHOWN_LINES = 15
_FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DockerImage:
    """An image that exists locally."""

    name: str
    has_healthcheck: bool


@dataclass(slots=True)
class Images:
    """The images that one event loop has built or pulled."""

    num_builds: int = 0
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict[str, asyncio.Lock])
    _tags: dict[str, str] = field(default_factory=dict[str, str])
    _failures: dict[str, list[Exception]] = field(default_factory=dict[str, list[Exception]])

    async def built(self, folder: Path, content: str, *, task: str, force: bool = False) -> DockerImage:
        """Return the image of a folder with a Dockerfile, building it if necessary. `content` is the folder's hash."""
        async with self._locks.setdefault(content, asyncio.Lock()):
            tag = self._tags.get(content) or await _tag(folder, content)
            self._tags[content] = tag
            image = None if force else await _find(tag)
            return image or await self._try(tag, self._build(folder, tag, task))

    async def present(self, name: str) -> DockerImage:
        """Return an image by name, pulling it if necessary."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            return await _find(name) or await self._try(name, _pull(name))

    async def _try(self, name: str, making: Coroutine[Any, Any, DockerImage]) -> DockerImage:
        """Await a build or pull. After `MAX_TRIES` failures raise the last error without trying again."""
        failures = self._failures.setdefault(name, [])
        if len(failures) >= MAX_TRIES:
            making.close()
            raise failures[-1]
        try:
            return await making
        except (SandboxBuildFailedError, ImageMissingError) as error:
            failures.append(error.with_traceback(None))
            raise

    async def _build(self, folder: Path, tag: str, task: str) -> DockerImage:
        self.num_builds += 1
        done = await docker("build", "--label", f"{TASK_LABEL}={task}", "--tag", tag, str(folder))
        done.require_engine()
        if done.code != 0:
            log = short(f"{done.stdout}\n{done.stderr}", _SHOWN_LINES)
            raise SandboxBuildFailedError(f"`docker build {folder}` failed:\n{log}")
        image = await _find(tag)
        if image is None:
            raise SandboxBuildFailedError(f"`docker build {folder}` did not create the image `{tag}`")
        return image


_images: WeakKeyDictionary[asyncio.AbstractEventLoop, Images] = WeakKeyDictionary()


def images() -> Images:
    """Return the images of the running event loop, to which their locks belong."""
    return _images.setdefault(asyncio.get_running_loop(), Images())


async def _tag(folder: Path, content: str) -> str:
    """Return a tag that depends on the folder's content and on the current images its Dockerfile starts from."""
    bases = sorted(set(_FROM.findall((folder / "Dockerfile").read_text(errors="replace"))))
    ids = [await _inspect(base, "{{.Id}}") for base in bases]
    return f"dockyard-task:{blake2b(' '.join([content, *ids]).encode(), digest_size=16).hexdigest()}"


async def _find(name: str) -> DockerImage | None:
    config = await _inspect(name, "{{json .Config}}")
    if not config:
        return None
    facts: dict[str, Any] = json.loads(config) or {}
    return DockerImage(name, has_healthcheck=bool(facts.get("Healthcheck")))


async def _pull(name: str) -> DockerImage:
    done = await docker("pull", "--quiet", name)
    done.require_engine()
    image = await _find(name)
    if image is None:
        raise ImageMissingError(f"image `{name}` does not exist locally and cannot be pulled: {short(done.stderr)}")
    return image


async def _inspect(image: str, form: str) -> str:
    """Return a property of the image; empty if the image does not exist locally."""
    try:
        return await ask("image", "inspect", "--format", form, image)
    except DockerError:
        return ""
