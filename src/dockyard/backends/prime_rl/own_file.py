"""A file that is Prime-RL's already: checked, and launched as it is, or in today's form if it has an older one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dockyard.backends.launch import BackendLaunch
from dockyard.backends.prime_rl.launch import environment_of
from dockyard.backends.prime_rl.toml import PLUGIN, Table
from dockyard.backends.prime_rl.translate import translate
from dockyard.errors import UsageError
from dockyard.run_dir.durable import disk_errors
from dockyard.settings.load import read_toml
from dockyard.settings.text import toml_document
from dockyard.tasks.folder import load_tasks


@dataclass(frozen=True, slots=True)
class OwnFile:
    """What will be launched."""

    file: Path
    """Today's form; written if `text` is set."""
    text: str | None
    environments: tuple[str, ...]
    """The types of environment that its rollouts run in."""
    notes: tuple[str, ...]

    def write(self) -> None:
        if self.text is not None:
            with disk_errors(self.file):
                self.file.write_text(self.text)

    def launch(self, rl: Path | None, words: Sequence[str]) -> BackendLaunch:
        """`words` are options of Prime-RL's own."""
        command = (str(rl or "rl"), "@", str(self.file), *words)
        return BackendLaunch(command=command, environment=environment_of(rl), notes=self.notes)


def read_own_file(file: Path) -> OwnFile:
    """Refused if its tasks are not there: Prime-RL would find out only after it has loaded the model."""
    translation = translate(read_toml(file))
    sources = [*_sources(translation.values, "train"), *_sources(translation.values, "eval")]
    if not _sources(translation.values, "train"):
        hint = "`[[orchestrator.train.source]]` names what to train on, as in `configs/harbor_8b.toml`"
        raise UsageError(f"`{file}` names nothing to train on", hint=hint)
    for source in sources:
        _check_tasks(source, file)
    harnesses = [_inner(source, "env", "agent", "harness") for source in sources]
    environments = tuple({str(harness.get("environment_type", "docker")) for harness in harnesses})
    if not translation.notes:
        return OwnFile(file, None, environments, ())
    new = file.with_suffix(".translated.toml")
    head = f"`{file}` is in an older form of Prime-RL's; `{new}` is the same in today's:"
    notes = (head, *(f"  {note}" for note in translation.notes))
    return OwnFile(new, toml_document(translation.values), environments, notes)


def _check_tasks(source: Table, file: Path) -> None:
    taskset = _inner(source, "env", "taskset")
    if taskset.get("id") != PLUGIN or "run_dir" in taskset:
        return
    folder = taskset.get("tasks_dir")
    if not isinstance(folder, str):
        raise UsageError(f"`tasks_dir` of a taskset in `{file}` is not set", hint="it names a folder of Harbor tasks")
    load_tasks(Path(folder))


def _sources(values: Table, split: str) -> list[Table]:
    sources = _inner(values, "orchestrator", split).get("source")
    return cast(list[Table], sources) if isinstance(sources, list) else []


def _inner(values: Table, *names: str) -> Table:
    for name in names:
        inner: Any = values.get(name)
        values = cast(Table, inner) if isinstance(inner, dict) else {}
    return values
