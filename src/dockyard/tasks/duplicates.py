"""Find tasks that are the same under different names, by comparing their files.

Exact duplicates have the same instruction, tests and environment except for whitespace. Near duplicates have the same
words in the instruction, and the same solution or the same tests in the same environment. Weaker criteria fail: whole
datasets use the instruction `Fix the failing tests` in one image, or the same `test.sh`, for different bugs.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from itertools import chain
from pathlib import Path, PurePath

from dockyard.tasks.folder import task_settings
from dockyard.types import Task

_BULLET = re.compile(r"^\s*[-*+]\s+", re.MULTILINE)
_WORD = re.compile(r"[^\W_]+|[-<>=+/%&|^~@$]")  # ignores characters that are only formatting
_LARGE = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Digests of the parts of a task that are compared."""

    instruction: str
    words: str
    """The words of the instruction without case, punctuation and layout."""
    tests: str
    environment: str
    solution: str | None
    """None if the task has none."""

    @property
    def exact(self) -> tuple[str, ...]:
        return self.instruction, self.tests, self.environment

    @property
    def near(self) -> list[tuple[str, ...]]:
        """Keys. Tasks with a key in common are duplicates."""
        solved = [("solution", self.words, self.solution)] if self.solution else []
        return [("tests", self.words, self.tests, self.environment), *solved]


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """A task that duplicates another one."""

    task: str
    of: str
    exact: bool


def find_duplicates(tasks: Sequence[Task]) -> list[Duplicate]:
    """Return all tasks except the first of each class of duplicates."""
    prints = [fingerprint(task) for task in tasks]
    return [
        Duplicate(task=tasks[other].name, of=tasks[first].name, exact=prints[other].exact == prints[first].exact)
        for first, *others in _classes(prints)
        for other in others
    ]


def duplicate_classes(tasks: Sequence[Task]) -> list[list[Task]]:
    """Group duplicates together. The order of the tasks is kept."""
    prints = [fingerprint(task) for task in tasks]
    return [[tasks[index] for index in members] for members in _classes(prints)]


def fingerprint(task: Task) -> Fingerprint:
    """Compute the fingerprint of a task from its folder."""
    parts: dict[str, list[PurePath]] = {}
    for file in _files(task.path):
        parts.setdefault(_part(file), []).append(file)
    instruction = [(task.path / file).read_bytes() for file in parts.get("instruction.md", [])]
    image = str(task_settings(task.path).get("environment", {}).get("docker_image", ""))
    return Fingerprint(
        instruction=_digest(b" ".join(text.split()) for text in instruction),
        words=_digest([_words(b"\n".join(instruction)).encode()]),
        tests=_digest(_contents(task.path, parts.get("tests", []))),
        environment=_digest(chain([image.encode()], _contents(task.path, parts.get("environment", [])))),
        solution=_digest(_contents(task.path, parts["solution"])) if "solution" in parts else None,
    )


def content_digest(tasks: Sequence[Task]) -> str:
    """Return a digest of all files and names of these tasks, independent of where their folders are."""
    files = ((task.name, task.path, file) for task in tasks for file in _files(task.path))
    return _digest(piece for name, path, file in files for piece in (name.encode(), bytes(file), _raw(path / file)))


def _classes(prints: Sequence[Fingerprint]) -> list[list[int]]:
    """Return the connected components of duplicates, as indices. The first index represents its class."""
    leaders = list(range(len(prints)))

    def leader(index: int) -> int:
        while leaders[index] != index:
            index = leaders[index]
        return index

    first_with: dict[tuple[str, ...], int] = {}
    for index, found in enumerate(prints):
        for key in found.near:
            low, high = sorted((leader(first_with.setdefault(key, index)), leader(index)))
            leaders[high] = low
    classes: dict[int, list[int]] = {}
    for index in range(len(prints)):
        classes.setdefault(leader(index), []).append(index)
    return list(classes.values())


def _files(folder: Path) -> list[PurePath]:
    """Return relative paths in a fixed order. Links count as files and are not followed."""
    found = [
        (parent / name).relative_to(folder) for parent, folders, names in folder.walk() for name in (*names, *folders)
    ]
    return sorted(file for file in found if (folder / file).is_symlink() or (folder / file).is_file())


def _part(file: PurePath) -> str:
    """Return the part of a task to which a file belongs. A step has the same parts, and `workdir`."""
    parts = file.parts[2:] if file.parts[0] == "steps" else file.parts
    top = parts[0] if parts else ""
    return "environment" if top == "workdir" else top


def _contents(folder: Path, files: Iterable[PurePath]) -> Iterator[bytes]:
    for file in files:
        yield bytes(file)
        yield _loose(folder / file)


def _loose(file: Path) -> bytes:
    """Return the content without whitespace differences; for large or binary files a digest."""
    if file.is_symlink() or file.stat().st_size > _LARGE:
        return _raw(file)
    data = file.read_bytes()
    return _raw(file) if b"\0" in data else b" ".join(data.split())


def _raw(file: Path) -> bytes:
    if file.is_symlink():
        return os.fsencode(os.readlink(file))
    with file.open("rb") as opened:
        return file_digest(opened, lambda: blake2b(digest_size=16)).digest()


def _words(text: bytes) -> str:
    return " ".join(_WORD.findall(_BULLET.sub("", text.decode(errors="replace").casefold())))


def _digest(pieces: Iterable[bytes]) -> str:
    digest = blake2b(digest_size=16)
    for piece in pieces:
        digest.update(len(piece).to_bytes(8) + piece)  # with its length, so that "ab", "c" differs from "a", "bc"
    return digest.hexdigest()
