"""The instructions of a Dockerfile that a sandbox supports: WORKDIR, ENV, ARG and local COPY/ADD, but not RUN.

The image named by FROM is not used: the tools are those of the host's /usr.
"""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from dockyard.rollout.sandbox.launch import READ_ONLY, is_below
from dockyard.rollout.sandbox.transfer import Entry

IGNORED = tuple("CMD ENTRYPOINT EXPOSE HEALTHCHECK LABEL MAINTAINER ONBUILD SHELL STOPSIGNAL VOLUME".split())
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
VARIABLE = re.compile(r"\\(\$)|\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")


class DockerfileError(Exception):
    """An instruction that a sandbox does not support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction, including its continuation lines."""

    line: int
    name: str
    """In upper case."""
    value: str

    def error(self, reason: str) -> DockerfileError:
        return DockerfileError(f"line {self.line} of its Dockerfile, `{self.name} {self.value[:80]}`: {reason}")


@dataclass(slots=True)
class SandboxImage:
    """The additions of the Dockerfile to an empty sandbox, filled instruction by instruction."""

    context: Path
    workdir: str = ""
    """Empty: the Dockerfile sets none."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    args: dict[str, str] = field(default_factory=dict[str, str])
    entries: list[Entry] = field(default_factory=list[Entry])


def read_image(dockerfile: Path) -> SandboxImage:
    """Return the last stage. COPY from earlier stages is not supported."""
    if dockerfile.with_name(".dockerignore").exists():
        raise DockerfileError("its `.dockerignore` is not supported")
    image = SandboxImage(context=dockerfile.parent)
    for instruction in _instructions(dockerfile.read_text()):
        if instruction.name == "FROM":
            image = SandboxImage(context=dockerfile.parent, args=image.args)
        else:
            _apply(instruction, image)
    return image


def _instructions(text: str) -> Iterator[Instruction]:
    start, parts = 0, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        start = start if parts else number
        parts.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            name, _, value = " ".join(parts).partition(" ")
            yield Instruction(line=start, name=name.upper(), value=value.strip())
            parts.clear()


def _apply(instruction: Instruction, image: SandboxImage) -> None:
    match instruction.name:
        case "WORKDIR":
            image.workdir = _inside(image, _expand(instruction.value.strip("\"'"), image))
            _require_writable(instruction, image.workdir)
        case "ENV":
            image.env |= _assignments(instruction, image)
        case "ARG":
            name, equals, default = instruction.value.partition("=")
            if equals:
                image.args[name] = _expand(default.strip("\"'"), image)
        case "COPY" | "ADD":
            entries = list(_copies(instruction, image))
            _require_writable(instruction, *(entry.target for entry in entries))
            image.entries.extend(entries)
        case "USER":
            if instruction.value.split(":")[0] not in ("root", "0"):
                raise instruction.error("a sandbox has no user but root")
        case "RUN":
            raise instruction.error("a sandbox cannot build images")
        case name if name not in IGNORED:
            raise instruction.error("unknown instruction")
        case _:
            pass


def _assignments(instruction: Instruction, image: SandboxImage) -> dict[str, str]:
    first, _, rest = instruction.value.partition(" ")
    if "=" not in first:  # the old form: ENV NAME the whole rest
        return {first: _expand(rest.strip(), image)}
    pairs = (word.partition("=") for word in _words(instruction))
    return {name: _expand(value, image) for name, _, value in pairs}


def _copies(instruction: Instruction, image: SandboxImage) -> Iterator[Entry]:
    flags, sources, target = _copy_words(instruction, image)
    if "--from" in flags:
        raise instruction.error("a sandbox cannot copy from other images or stages")
    mode = int(flags["--chmod"], 8) if flags.get("--chmod", "x").isdigit() else None
    for source in sources:
        paths = _matches(instruction, image, source)
        into_folder = target.endswith("/") or len(sources) > 1 or len(paths) > 1
        for path in paths:
            place = PurePosixPath(_inside(image, target))
            if path.is_dir():
                yield from (Entry(source=child, target=str(place / child.name), mode=mode) for child in path.iterdir())
            else:
                yield Entry(source=path, target=str(place / path.name if into_folder else place), mode=mode)


def _copy_words(instruction: Instruction, image: SandboxImage) -> tuple[dict[str, str], list[str], str]:
    value = instruction.value
    flags: dict[str, str] = {}
    while value.startswith("--"):
        flag, _, value = value.partition(" ")
        name, _, flags[name] = flag.partition("=")
        value = value.strip()
    words = json.loads(value) if value.startswith("[") else _words(instruction)[len(flags) :]
    *sources, target = (_expand(str(word), image) for word in words)
    if not sources:
        raise instruction.error("needs a source and a target")
    return flags, sources, target


def _matches(instruction: Instruction, image: SandboxImage, source: str) -> list[Path]:
    """Return the files of the build context that match `source`. Raise an error if one is outside."""
    if "<<" in source or "://" in source or source.startswith("git@"):
        raise instruction.error("only files next to the Dockerfile can be copied")
    if instruction.name == "ADD" and source.endswith(ARCHIVES):
        raise instruction.error("archives are not unpacked; use COPY")
    context = image.context.resolve()
    pattern = str(PurePosixPath("/", source).relative_to("/"))
    found = [context] if pattern == "." else sorted(context.glob(pattern))
    paths = [path.resolve() for path in found]
    if not paths or not all(path.is_relative_to(context) for path in paths):
        raise instruction.error(f"`{source}` is not next to the Dockerfile")
    return paths


def _require_writable(instruction: Instruction, *targets: str) -> None:
    for target in targets:
        if is_below(target, READ_ONLY):
            raise instruction.error(f"`{target}` is read-only in a sandbox")


def _words(instruction: Instruction) -> list[str]:
    try:
        return shlex.split(instruction.value)
    except ValueError as error:
        raise instruction.error(str(error)) from None


def _inside(image: SandboxImage, path: str) -> str:
    """Return the absolute path, without `..`."""
    parts: list[str] = []
    for part in PurePosixPath("/", image.workdir, path).parts[1:]:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/" + "/".join(parts)


def _expand(text: str, image: SandboxImage) -> str:
    values = image.args | image.env

    def replace(match: re.Match[str]) -> str:
        escaped, plain, braced, operator, word = match.groups()
        value = values.get(plain or braced or "", "")
        if operator == "+":
            return word if value else ""
        return escaped or value or word or ""

    return VARIABLE.sub(replace, text)
