"""Generated tasks: what one is before it is a folder, and the folder."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Protocol

from dockyard.tasks.vocabulary import HELDOUT, TRAIN, Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One task before it is written to disk."""

    instruction: str
    credits: dict[float, str]
    """Shell conditions run in /app, in rising order: the last that holds gives the reward. None holds at the start."""
    solution: str
    files: dict[str, str] = field(default_factory=dict[str, str])
    """What /app holds at the start."""


type Kinds = Mapping[str, Callable[[random.Random, Vocabulary], Draft]]
"""How each kind of task is made, by its name."""


class WriteTasks(Protocol):
    """Fills `folder/train` and `folder/heldout`. The same arguments give the same tasks."""

    def __call__(self, folder: Path, *, num_train: int = ..., num_heldout: int = ..., seed: int = ...) -> None: ...


_TASK_TOML = """\
schema_version = "1.4"

[task]
name = "dockyard-{source}/{name}"
description = "A small shell task: {kind}"

[metadata]
kind = "{kind}"

[agent]
timeout_sec = 600

[verifier]
timeout_sec = 60
"""

_DOCKERFILE = """\
FROM debian:bookworm-slim
WORKDIR /app
COPY files/ /app/
"""

_TEST_SH = """\
#!/bin/bash
cd /app
reward=0
{checks}
echo "$reward" > /logs/verifier/reward.txt
"""


def write_generated(folder: Path, source: str, kinds: Kinds, *, num_train: int, num_heldout: int, seed: int) -> None:
    """Fill `folder/train` and `folder/heldout` with tasks of these kinds. The same arguments give the same tasks."""
    for side, count, vocabulary in (("train", num_train, TRAIN), ("heldout", num_heldout, HELDOUT)):
        for index, (kind, draft) in enumerate(_drafts(random.Random(f"{seed}-{side}"), kinds, vocabulary, count)):
            name = f"{side}-{index:03}-{kind}"
            toml = _TASK_TOML.format(source=source, name=name, kind=kind)
            _write_task(folder / side / name, toml, draft)


def _drafts(rng: random.Random, kinds: Kinds, vocabulary: Vocabulary, count: int) -> Iterator[tuple[str, Draft]]:
    """The kinds in turn, no instruction twice."""
    seen: set[str] = set()
    turns = cycle(kinds.items())
    while len(seen) < count:
        kind, make = next(turns)
        draft = make(rng, vocabulary)
        while draft.instruction in seen:
            draft = make(rng, vocabulary)
        seen.add(draft.instruction)
        yield kind, draft


def _write_task(path: Path, toml: str, draft: Draft) -> None:
    checks = "\n".join(f"if {condition}; then reward={credit}; fi" for credit, condition in draft.credits.items())
    contents = {
        "task.toml": toml,
        "instruction.md": draft.instruction + "\n",
        "environment/Dockerfile": _DOCKERFILE,
        "environment/files/.keep": "",  # COPY needs something to copy
        "tests/test.sh": _TEST_SH.format(checks=checks),
        "solution/solve.sh": f"#!/bin/bash\ncd /app\n{draft.solution}\n",
        **{f"environment/files/{file}": text for file, text in draft.files.items()},
    }
    for file, text in contents.items():
        target = path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        if target.suffix == ".sh":
            target.chmod(0o755)
