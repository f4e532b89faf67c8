"""Turn rows of SWE-bench into Harbor tasks on the public images, graded by the harness of the `swebench` package."""

import json
from collections.abc import Mapping
from pathlib import Path
from string import Template

from dockyard.tasks.folder import OccupiedError, Skipped, WrittenTasks, check_out, put_task
from dockyard.tasks.rows import DatasetRow, choose_rows, read_rows
from dockyard.tasks.sources import DatasetRows, SourceRequest
from dockyard.tasks.split import Selection
from dockyard.tasks.swebench.harness import TEMPLATE, SwebenchHarness, find_harness
from dockyard.tasks.swebench.instance import DEFAULT_DATASET, Instance, UnusableRowError, match, read_instance

__all__ = ["DEFAULT_DATASET", "SOURCE", "write_swebench_tasks"]

_TIMEOUT_S = 1800
"""Time limit of the tests, as in SWE-bench's own runs."""
_GRADING_S = 120
_HUB_SPLIT = "test"


def write_swebench_tasks(
    folder: Path,
    *,
    dataset: str = DEFAULT_DATASET,
    selection: Selection | None = None,
    mapping: Mapping[str, str] | None = None,
    split: str | None = None,
) -> WrittenTasks:
    """Write a task folder for each selected row. `split` defaults to `test` on the Hub, to all rows of local files."""
    check_out(folder)
    harness = find_harness()
    selection = selection or Selection()
    is_local = Path(dataset).expanduser().exists()
    rows = read_rows(dataset, split=split or (None if is_local else _HUB_SPLIT))
    written = WrittenTasks(folder, skipped=list(rows.skipped), limit=selection.limit)
    if not rows.rows:
        return written
    names = match(rows.columns, mapping or {}, dataset)
    for row in choose_rows(rows.rows, names, selection, written, dataset):
        if written.is_full:
            break
        _write_row(row, names, harness, written)
    return written


def _write_row(row: DatasetRow, names: Mapping[str, str], harness: SwebenchHarness, written: WrittenTasks) -> None:
    try:
        instance = read_instance(row, names, harness)
        if instance.instance_id in written.names:
            raise UnusableRowError(f"has the same id `{instance.instance_id}` as an earlier row")
        put_task(written.folder / instance.instance_id, task_files(instance, harness))
    except (UnusableRowError, OccupiedError) as error:
        written.skipped.append(Skipped(where=row.place, why=str(error)))
    except UnicodeError as error:
        written.skipped.append(Skipped(where=row.place, why=f"has text that is not valid UTF-8: {error}"))
    else:
        written.names.append(instance.instance_id)


def task_files(instance: Instance, harness: SwebenchHarness) -> dict[str, str | bytes | Path]:
    """Return the files of a Harbor task. The agent does not see `solution` and `tests`."""
    values = {
        "instance_id": instance.instance_id,
        "repo": instance.repo,
        "base_commit": instance.base_commit,
        "problem_statement": instance.problem_statement.strip(),
        "image": instance.image,
        "swebench": harness.version,
        "verifier_timeout_s": _TIMEOUT_S + _GRADING_S,
    }
    filled = ("task.toml", "instruction.md", "environment/Dockerfile")
    copied = ("solution/solve.sh", "tests/test.sh", "tests/grade.py")
    grading = {"timeout_s": _TIMEOUT_S, "instance": instance.grading}
    return {
        **{name: Template((TEMPLATE / name).read_text()).substitute(values) for name in filled},
        **{name: TEMPLATE / name for name in copied},
        "solution/gold.patch": _ended(instance.patch).encode(),
        "tests/instance.json": json.dumps(grading, indent=2),
        **{f"tests/{name}": content for name, content in harness.files.items()},
    }


def _ended(patch: str) -> str:
    """Add the final newline, without which git refuses a patch."""
    return patch if patch.endswith("\n") else f"{patch}\n"


def _write_requested(folder: Path, request: SourceRequest) -> WrittenTasks:
    settings = request.settings
    return write_swebench_tasks(
        folder,
        dataset=settings.dataset or DEFAULT_DATASET,
        split=settings.split,
        selection=request.selection,
        mapping=settings.map,
    )


SOURCE = DatasetRows(_write_requested)
