"""Check and launch a settings file of Prime-RL. A file in an older form is translated first."""

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
    """The file to launch."""

    file: Path
    """The file in the current form. It is written first if `text` is set."""
    text: str | None
    environments: tuple[str, ...]
    """The types of environment that its rollouts run in."""
    notes: tuple[str, ...]

    def write(self) -> None:
        if self.text is not None:
            with disk_errors(self.file):
                self.file.write_text(self.text)

    def launch(self, rl: Path | None, words: Sequence[str]) -> BackendLaunch:
        """Return the command. `words` are options that are passed to Prime-RL."""
        command = (str(rl or "rl"), "@", str(self.file), *words)
        return BackendLaunch(command=command, environment=environment_of(rl), notes=self.notes)


def read_own_file(file: Path) -> OwnFile:
    """Read the file. Missing tasks are an error here, because Prime-RL would notice only after loading the model."""
    translation = translate(read_toml(file))
    sources = [*_sources(translation.values, "train"), *_sources(translation.values, "eval")]
    if not _sources(translation.values, "train"):
        hint = "add `[[orchestrator.train.source]]`, as in `configs/harbor_8b.toml`"
        raise UsageError(f"`{file}` has no source to train on", hint=hint)
    for source in sources:
        _check_tasks(source, file)
    harnesses = [_inner(source, "env", "agent", "harness") for source in sources]
    environments = tuple({str(harness.get("environment_type", "docker")) for harness in harnesses})
    if not translation.notes:
        return OwnFile(file, None, environments, ())
    new = file.with_suffix(".translated.toml")
    head = f"`{file}` has the form of an older Prime-RL; `{new}` is its translation:"
    notes = (head, *(f"  {note}" for note in translation.notes))
    return OwnFile(new, toml_document(translation.values), environments, notes)


def _check_tasks(source: Table, file: Path) -> None:
    taskset = _inner(source, "env", "taskset")
    if taskset.get("id") != PLUGIN or "run_dir" in taskset:
        return
    folder = taskset.get("tasks_dir")
    if not isinstance(folder, str):
        raise UsageError(f"`tasks_dir` of a taskset in `{file}` is not set", hint="set it to a folder of Harbor tasks")
    load_tasks(Path(folder))


def _sources(values: Table, split: str) -> list[Table]:
    sources = _inner(values, "orchestrator", split).get("source")
    return cast(list[Table], sources) if isinstance(sources, list) else []


def _inner(values: Table, *names: str) -> Table:
    for name in names:
        inner: Any = values.get(name)
        values = cast(Table, inner) if isinstance(inner, dict) else {}
    return values
