"""`dockyard tasks`: write task folders. `dockyard tasks check` is in `check.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dockyard.cli.args import DEBUG, Flag, Given, Verb, positive
from dockyard.cli.terminal import say
from dockyard.errors import UsageError

if TYPE_CHECKING:
    from dockyard.tasks.folder import WrittenTasks
    from dockyard.tasks.split import Selection

_OUT = Flag("folder", "the folder to write; each task becomes a folder in it", {"metavar": "OUT", "type": Path})
_ROW_FLAGS = (
    Flag(
        "--repo",
        "only tasks of this repository (may be repeated)",
        {"metavar": "OWNER/NAME", "action": "append", "default": []},
    ),
    Flag("--id", "only this instance (may be repeated)", {"metavar": "ID", "action": "append", "default": []}),
    Flag("--limit", "write at most N tasks", {"metavar": "N", "type": positive}),
    Flag("--seed", "shuffle the tasks with this seed before `--limit` is applied", {"metavar": "N", "type": int}),
    Flag(
        "--map",
        "use the column THEIRS of the dataset as our column OURS (may be repeated)",
        {"metavar": "OURS=THEIRS", "action": "append", "default": []},
    ),
    DEBUG,
)
"""Which rows of a dataset are used, and the names of its columns."""


def _demo(given: Given) -> int:
    from dockyard.tasks.generated import write_demo_tasks

    return _write_both(given.flags.folder, write_demo_tasks)


def _trail(given: Given) -> int:
    from dockyard.tasks.generated import write_trail_tasks

    return _write_both(given.flags.folder, write_trail_tasks)


def _write_both(folder: Path, write: Callable[[Path], None]) -> int:
    """Write training and held-out tasks to a folder that has neither."""
    for name in ("train", "heldout"):
        if (folder / name).exists():
            raise UsageError(f"`{folder / name}` already exists", hint="choose another folder, or remove it first")
    write(folder)
    say(f"wrote {folder / 'train'} and {folder / 'heldout'}")
    return 0


def _swebench(given: Given) -> int:
    from dockyard.tasks.rows import parse_mapping
    from dockyard.tasks.swebench import DEFAULT_DATASET, write_swebench_tasks

    written = write_swebench_tasks(
        given.flags.folder,
        dataset=given.flags.dataset or DEFAULT_DATASET,
        split=given.flags.split,
        selection=_selection(given),
        mapping=parse_mapping(given.flags.map),
    )
    return _report(written)


def _c2bug(given: Given) -> int:
    from dockyard.tasks.c2bug import DEFAULT_DATASET, write_c2bug_tasks
    from dockyard.tasks.rows import parse_mapping

    flags = given.flags
    written = write_c2bug_tasks(
        flags.folder,
        dataset=flags.dataset or DEFAULT_DATASET,
        split=flags.split,
        selection=_selection(given),
        mapping=parse_mapping(flags.map),
        repositories=flags.repositories,
        template=flags.template,
        image=flags.image,
    )
    return _report(written)


def _selection(given: Given) -> "Selection":
    from dockyard.tasks.split import Selection

    flags = given.flags
    return Selection(repos=tuple(flags.repo), ids=tuple(flags.id), limit=flags.limit, seed=flags.seed)


def _report(written: "WrittenTasks") -> int:
    """List the rows that did not become tasks. The exit code is 1 when no row did."""
    say(written.table())
    return 0 if written.names else 1


_DEMO_OUT = Flag("folder", "the folder to write `train` and `heldout` to", {"metavar": "DIR", "type": Path})
VERBS = (
    Verb(name="tasks demo", about="Write the tasks of the demo to a folder.", act=_demo, flags=(_DEMO_OUT, DEBUG)),
    Verb(
        name="tasks trail",
        about="Write tasks that need three or four model calls: each note in the task names the next one.",
        act=_trail,
        flags=(_DEMO_OUT, DEBUG),
    ),
    Verb(
        name="tasks swebench",
        about="Write tasks from SWE-bench. They use its public images and are graded by its own harness.",
        act=_swebench,
        flags=(
            _OUT,
            Flag(
                "--dataset",
                "a .jsonl, .json or .parquet file, or a Hub name (default: SWE-bench Verified)",
                {"metavar": "NAME"},
            ),
            Flag("--split", "the split of a Hub dataset (default: test)", {"metavar": "NAME"}),
            *_ROW_FLAGS,
        ),
    ),
    Verb(
        name="tasks c2bug",
        about="Write tasks from a dataset of bugs in git repositories. docs/guides/tasks.md lists its columns.",
        act=_c2bug,
        flags=(
            _OUT,
            Flag("--dataset", "a .jsonl, .json or .parquet file, a folder, or a Hub name", {"metavar": "NAME"}),
            Flag("--split", "read only the files of this split", {"metavar": "NAME"}),
            Flag("--repositories", "a folder of local checkouts or bundles", {"metavar": "DIR", "type": Path}),
            Flag(
                "--template",
                "a folder with your own Dockerfile, instruction.md, task.toml and test.sh",
                {"metavar": "DIR", "type": Path},
            ),
            Flag("--image", "the image that every task is built on", {"metavar": "IMAGE"}),
            *_ROW_FLAGS,
        ),
    ),
)
