"""Read a run folder from Python. The run may be finished or still in progress; nothing in the folder is changed."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.paths import RunPaths
from dockyard.run_dir.run import read_metrics, read_recorded, read_summary, recorded_files
from dockyard.run_dir.tables import Table, metrics_table, rollouts_table
from dockyard.settings.load import load_run_config

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

# pyarrow and pandas have no types of their own.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

type TableKind = Literal["pandas", "arrow"]


@dataclass(frozen=True)
class Run:
    """The results of a run, as `load_run` and the functions that make runs return them."""

    path: Path
    """The run folder."""

    @cached_property
    def config(self) -> RunConfig:
        """The settings of the run."""
        return load_run_config(self._paths.config, [f"--run_dir={self.path}"])

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
        """
        files = [self._paths.rollouts_of(phase)] if phase else recorded_files(self.path) or []
        recorded = [rollout for file in files for rollout in read_recorded(file)]
        return _as(as_, rollouts_table(recorded, tokens=tokens), "rollouts")

    @property
    def _paths(self) -> RunPaths:
        return RunPaths(self.path)


def load_run(path: Path | str) -> Run:
    """Open the folder of a run for reading, while it is in progress or after its end."""
    folder = Path(path)
    if not RunPaths(folder).config.is_file():
        raise UsageError(f"`{folder}` holds no run", hint="`dockyard train RUN.toml` starts one")
    return Run(folder.absolute())


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
