"""Converts finished Harbor jobs, traces and runs to training samples.

The text of an agent's trajectory is tokenised with the model's chat template, and only the model's turns are in the
loss. Where the sampled ids are known, they are used instead.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dockyard.convert.conversation import Converted
    from dockyard.convert.samples import Sample
    from dockyard.convert.tokenize import SavedTokenizer
    from dockyard.gateway.render.renderer import Renderer

__all__ = ["HarborTrajectoryConverter"]


class HarborTrajectoryConverter:
    """Reads the files that Harbor's agents wrote, and converts them for one model."""

    def __init__(self, tokenizer: "Renderer | Path | str | SavedTokenizer", *, exact: bool = True) -> None:
        """`tokenizer` is a model folder, a name on the Hub, or a tokenizer of `transformers`.

        Without `exact`, token ids that agents stored are not used; everything is tokenised from text.
        """
        from dockyard.convert.report import ConversionReport
        from dockyard.convert.tokenize import load_renderer

        self._renderer = load_renderer(tokenizer)
        self._exact = exact
        self.report = ConversionReport()
        """Counts of the last call: trials read, converted, and skipped by reason."""

    def load_job(self, path: Path | str) -> "list[Sample]":
        """The samples of a job, a trial, a Dockyard run or a single trajectory."""
        from dockyard.convert.read import read_trials

        return self._samples(read_trials(Path(path), self._renderer, exact=self._exact))

    def load_traces_parquet(self, path: Path | str) -> "list[Sample]":
        """The samples of a trace file, in the columns of current or earlier Harbor versions."""
        from dockyard.convert.tokenize import Tokeniser
        from dockyard.convert.traces import read_trace_file

        return self._samples(read_trace_file(Path(path), Tokeniser(self._renderer, self._exact)))

    def _samples(self, trials: "Iterable[Converted]") -> "list[Sample]":
        from dockyard.convert.report import ConversionReport
        from dockyard.convert.samples import SampleNumbers, converted_samples

        self.report, numbers = ConversionReport(), SampleNumbers()
        samples: list[Sample] = []
        for found in trials:
            self.report.add(found)
            samples += converted_samples(found, numbers, self._renderer)
        self.report.samples = len(samples)
        return samples
