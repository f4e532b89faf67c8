"""Finished Harbor jobs, traces and runs become training samples.

The words of an agent's trajectory are tokenised with the model's own template, the model's turns alone in the loss;
where the ids that were sampled are known, those are used instead.
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
    """Reads what Harbor's agents left on disk, for one model."""

    def __init__(self, tokenizer: "Renderer | Path | str | SavedTokenizer", *, exact: bool = True) -> None:
        """`tokenizer` is a model folder, a name on the Hub, or a tokenizer of `transformers`.

        Without `exact`, token ids that agents kept are not used: all is tokenised from text.
        """
        from dockyard.convert.report import ConversionReport
        from dockyard.convert.tokenize import load_renderer

        self._renderer = load_renderer(tokenizer)
        self._exact = exact
        self.report = ConversionReport()
        """What the last call came to: trials seen, converted, skipped by reason."""

    def load_job(self, path: Path | str) -> "list[Sample]":
        """The samples of a job, a trial, a run of ours or a single trajectory."""
        from dockyard.convert.read import read_trials

        return self._samples(read_trials(Path(path), self._renderer, exact=self._exact))

    def load_traces_parquet(self, path: Path | str) -> "list[Sample]":
        """The samples of a file of traces, in Harbor's columns of now or of earlier."""
        from dockyard.convert.tokenize import Tokeniser
        from dockyard.convert.traces import read_traced

        return self._samples(read_traced(Path(path), Tokeniser(self._renderer, self._exact)))

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
