"""C2Bug: bugs injected into real repositories, as Harbor tasks. Rows that cannot become a task are reported.

The task's image contains the repository at its base commit with the bug, without history and without the tests that
reveal it. These are in `tests/`, which the agent never sees. `docs/guides/tasks.md` lists the columns of a dataset.
"""

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dockyard.errors import DockyardError
from dockyard.tasks.c2bug.prepare import prepare
from dockyard.tasks.c2bug.schema import Bug, RowError, check_patches, match_layout, read_bug
from dockyard.tasks.c2bug.task import read_template, task_files, task_name
from dockyard.tasks.folder import LONGEST_NAME, OccupiedError, Skipped, WrittenTasks, check_out, put_task
from dockyard.tasks.repository import GitError, Repositories, Repository
from dockyard.tasks.rows import DatasetRow, Rows, choose_rows, read_rows
from dockyard.tasks.sources import DatasetRows, SourceRequest
from dockyard.tasks.split import Selection

logger = logging.getLogger(__name__)

DEFAULT_DATASET = "TwelfthStar/c2bug_tasks_django_Jan-22-2026"


def write_c2bug_tasks(
    folder: Path,
    *,
    dataset: str = DEFAULT_DATASET,
    split: str | None = None,
    selection: Selection | None = None,
    mapping: Mapping[str, str] | None = None,
    repositories: Path | None = None,
    template: Path | None = None,
    image: str | None = None,
) -> WrittenTasks:
    """Write a task folder for each selected row.

    `repositories` has local checkouts or bundles; `template` replaces the four template files; `image` is for all.
    """
    if repositories is not None and not repositories.is_dir():
        raise DockyardError(f"`{repositories}` is not a folder of repositories", hint="check `--repositories`")
    check_out(folder)
    texts = read_template(template)
    rows = read_rows(dataset, split=split)
    columns = match_layout(rows.columns, mapping or {}, dataset) if rows.rows else {}
    check_patches(rows.rows, columns, mapping or {}, rows.columns)
    selection = selection or Selection()
    written = WrittenTasks(folder, skipped=[*rows.skipped], limit=selection.limit)
    named = _named(rows, columns, written)
    chosen = choose_rows(named, columns, selection, written, rows.source) if named else []
    with tempfile.TemporaryDirectory(prefix="dockyard-c2bug-") as work:
        writer = _Writer(folder, Path(work), Repositories(Path(work), repositories), texts, image)
        for row in chosen:
            if written.is_full:
                break
            _write(row, columns, writer, written)
    return written


def _named(rows: Rows, columns: Mapping[str, str], written: WrittenTasks) -> list[DatasetRow]:
    """Return the rows that have a repository and a unique name; record the others as skipped."""
    named: dict[str, DatasetRow] = {}
    for row in rows.rows:
        identity, repo = (row.values.get(columns[name]) for name in ("instance_id", "repo"))
        name = task_name(str(identity or ""))
        if not name or not repo:
            lacks = columns["repo" if name else "instance_id"]
            written.skipped.append(Skipped(where=row.place, why=f"its `{lacks}` is empty"))
        elif len(name) > LONGEST_NAME:
            why = f"its `{columns['instance_id']}` is too long for a folder name: more than {LONGEST_NAME} characters"
            written.skipped.append(Skipped(where=row.place, why=why))
        elif name in named:
            written.skipped.append(Skipped(where=row.place, why=f"`{identity}` is also in {named[name].place}"))
        else:
            named[name] = row
    return list(named.values())


@dataclass(frozen=True, slots=True)
class _Writer:
    folder: Path
    work: Path
    repositories: Repositories
    template: Mapping[str, str]
    image: str | None

    def write(self, bug: Bug) -> str:
        """Write the task and return its name."""
        address = self.repositories.find(bug.repo, bug.clone_url.strip() or None)
        repository = self.repositories.open(address, bug.base_commit)
        prepared = prepare(bug, repository)
        archive = self._archive(repository, prepared.base)
        name = task_name(bug.instance_id)
        put_task(self.folder / name, task_files(bug, prepared, archive, self.template, self.image))
        return name

    def _archive(self, repository: Repository, tree: str) -> Path:
        """Create the archive once for all bugs of a commit."""
        file = self.work / f"{tree}.tar.gz"
        if not file.exists():
            file.write_bytes(repository.archive(tree))
        return file


def _write(row: DatasetRow, columns: Mapping[str, str], writer: _Writer, written: WrittenTasks) -> None:
    try:
        name = writer.write(read_bug(row, columns))
    except (RowError, GitError, OccupiedError, ValueError) as error:  # text that is not valid UTF-8 or contains NUL
        identity = row.values.get(columns["instance_id"])
        written.skipped.append(Skipped(where=f"{row.place} (`{identity}`)", why=str(error)))
    else:
        logger.info("wrote %s", name)
        written.names.append(name)


def _write_requested(folder: Path, request: SourceRequest) -> WrittenTasks:
    settings = request.settings
    return write_c2bug_tasks(
        folder,
        dataset=settings.dataset or DEFAULT_DATASET,
        split=settings.split,
        selection=request.selection,
        mapping=settings.map,
        repositories=settings.repositories,
        image=settings.image,
    )


SOURCE = DatasetRows(_write_requested)
