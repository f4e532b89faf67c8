"""A file that is Prime-RL's already: checked, and launched as it is, or in today's form if it has an older one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dockyard.backends.launch import Launch
from dockyard.backends.prime_rl.programs import environment_of
from dockyard.backends.prime_rl.toml import PLUGIN, Table
from dockyard.backends.prime_rl.translate import translate
from dockyard.errors import UsageError
from dockyard.settings import read_toml
from dockyard.settings.text import toml_document
from dockyard.tasks import load_tasks


@dataclass(frozen=True, slots=True)
class OwnFile:
    """What will be launched."""

    file: Path
    """Today's form; written if `text` is set."""
    text: str | None
    notes: tuple[str, ...]

    def write(self) -> None:
        if self.text is not None:
            self.file.write_text(self.text)

    def launch(self, rl: Path | None, words: Sequence[str]) -> Launch:
        """`words` are options of Prime-RL's own."""
        command = (str(rl or "rl"), "@", str(self.file), *words)
        return Launch(command=command, environment=environment_of(rl), notes=self.notes)


def read_own_file(file: Path) -> OwnFile:
    """Refused if its tasks are not there: Prime-RL would find out only after it has loaded the model."""
    translation = translate(read_toml(file))
    _check_sources(translation.values, file)
    if not translation.notes:
        return OwnFile(file, None, ())
    new = file.with_suffix(".translated.toml")
    head = f"`{file}` is in an older form of Prime-RL's; `{new}` is the same in today's:"
    return OwnFile(new, toml_document(translation.values), (head, *(f"  {note}" for note in translation.notes)))


def _check_sources(values: Table, file: Path) -> None:
    for split in ("train", "eval"):
        sources = _inner(values, "orchestrator", split).get("source", [])
        for source in cast(list[Table], sources if isinstance(sources, list) else []):
            _check_source(source, split, file)
    if not _inner(values, "orchestrator", "train").get("source"):
        hint = "`[[orchestrator.train.source]]` names what to train on, as in `configs/harbor_8b.toml`"
        raise UsageError(f"`{file}` names nothing to train on", hint=hint)


def _check_source(source: Table, split: str, file: Path) -> None:
    taskset = _inner(source, "env", "taskset")
    if taskset.get("id") != PLUGIN or "run_dir" in taskset:
        return
    folder = taskset.get("tasks_dir")
    key = f"orchestrator.{split}.source.env.taskset.tasks_dir"
    if not isinstance(folder, str):
        raise UsageError(f"`{key}` in `{file}` is not set", hint="it names a folder of Harbor tasks")
    load_tasks(Path(folder))


def _inner(values: Table, *names: str) -> Table:
    for name in names:
        inner: Any = values.get(name)
        values = cast(Table, inner) if isinstance(inner, dict) else {}
    return values
