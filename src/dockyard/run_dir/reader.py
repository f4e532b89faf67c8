"""Read a run folder from Python. The run may be finished or still in progress; nothing in the folder is changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.paths import RunPaths
from dockyard.run_dir.run import read_metrics, read_recorded, read_summary, recorded_files
from dockyard.run_dir.tables import Table, metrics_table, rollouts_table
from dockyard.settings.arguments import path_argument
from dockyard.settings.load import SettingsFile, load
from dockyard.settings.overrides import Overrides, Patch

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

# pyarrow and pandas have no types of their own.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

type TableKind = Literal["pandas", "arrow"]

_MAX_PHASES = 12
"""How many phases an error message lists."""


@dataclass(frozen=True)
class Run:
    """The results of a run, as `load_run` and the functions that make runs return them."""

    path: Path
    """The run folder."""

    @cached_property
    def config(self) -> RunConfig:
        """The settings of the run."""
        return _recorded_config(self._paths)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The contents of `summary.json`, or None as long as the run is not finished."""
        return read_summary(self._paths)

    @property
    def adapter(self) -> Path | None:
        """The folder of the newest trained LoRA adapter.

        None before the first update, and for a run that trains nothing or trains all weights.
        """
        trained = [
            folder
            for folder in sorted(self._paths.adapters.glob("v*"))
            if (folder / "adapter_config.json").is_file() and folder != self._paths.adapter(0)
        ]
        return trained[-1] if trained else None

    @overload
    def metrics(self, as_: Literal["pandas"] = "pandas") -> "pd.DataFrame": ...
    @overload
    def metrics(self, as_: Literal["arrow"]) -> "pa.Table": ...
    def metrics(self, as_: TableKind = "pandas") -> "pd.DataFrame | pa.Table":
        """Return one row per training step: `step` and the metrics, such as `reward/mean`.

        `as_="arrow"` returns a pyarrow Table instead of a pandas DataFrame.
        """
        return _as(as_, metrics_table(read_metrics(self._paths)), "metrics")

    @overload
    def rollouts(
        self, phase: str | None = None, *, tokens: bool = False, as_: Literal["pandas"] = "pandas"
    ) -> "pd.DataFrame": ...
    @overload
    def rollouts(self, phase: str | None = None, *, tokens: bool = False, as_: Literal["arrow"]) -> "pa.Table": ...
    def rollouts(
        self, phase: str | None = None, *, tokens: bool = False, as_: TableKind = "pandas"
    ) -> "pd.DataFrame | pa.Table":
        """Return one row per rollout: phase, step, group, task, kind, attempt, reward, failure, transcript, counts.

        `phase` selects one phase: `step-00003`, `eval-before`, `eval-00003`, `eval-after`, `rollouts` or `eval`.
        `tokens` adds the column `segments`: token ids, which of them were sampled, log-probabilities and weight
        versions. `as_="arrow"` returns a pyarrow Table instead of a pandas DataFrame.

        Raise UsageError if the run has recorded no rollouts of the phase.
        """
        files = recorded_files(self.path) or []
        if phase is not None:
            files = [_file_of(phase, files, self.path)]
        recorded = [rollout for file in files for rollout in read_recorded(file)]
        return _as(as_, rollouts_table(recorded, tokens=tokens), "rollouts")

    @property
    def _paths(self) -> RunPaths:
        return RunPaths(self.path)


def load_run(path: Path | str) -> Run:
    """Open the folder of a run for reading, while it is in progress or after its end.

    Raise UsageError if the folder holds no run, or if the settings of the run cannot be read.
    """
    folder = path_argument("path", path, hint='name the folder of a run, e.g. `load_run("runs/NAME")`')
    if not RunPaths(folder).config.is_file():
        raise UsageError(f"`{folder}` holds no run", hint="`dockyard train RUN.toml` starts one")
    run = Run(folder.absolute())
    _ = run.config  # a folder of another program is an error here, not a run without results
    return run


def _recorded_config(paths: RunPaths) -> RunConfig:
    """Read the settings of a run. Rules between settings are not checked: they may be newer than the run."""
    file = SettingsFile.read(paths.config)
    if not file.values:
        hint = "name the folder of a run, which `dockyard train`, `rollout` or `eval` made"
        raise UsageError(f"`{paths.config}` is empty: the folder holds no run", hint=hint)
    here = Patch({"run_dir": paths.root}, "run_dir")  # the folder may have been moved
    return load(RunConfig, file, Overrides((here,)))


def _file_of(phase: str, files: Sequence[Path], folder: Path) -> Path:
    """Return the file of a phase's rollouts. Raise UsageError that lists the phases if there is none."""
    by_phase = {file.stem: file for file in files}
    if phase in by_phase:
        return by_phase[phase]
    names = [f"`{name}`" for name in by_phase]
    if len(names) > _MAX_PHASES:
        names = [*names[: _MAX_PHASES - 1], f"... {names[-1]}"]
    hint = f"the phases of this run are {', '.join(names)}" if names else "the run has recorded no rollouts yet"
    raise UsageError(f"`{phase}` is not a phase that `{folder}` has rollouts of", hint=hint)


def _as(kind: TableKind, table: Table, name: str) -> "pd.DataFrame | pa.Table":
    if kind == "arrow":
        return table
    if kind != "pandas":
        raise UsageError(f"`as_` is `{kind}`; it must be `pandas` or `arrow`", hint=f'`run.{name}(as_="arrow")`')
    try:
        return table.to_pandas()
    except ModuleNotFoundError as error:
        hint = f'`pip install pandas`, or `run.{name}(as_="arrow")`, which needs no other package'
        raise DockyardError(f"`run.{name}()` needs `pandas`, which is not installed", hint=hint) from error
