"""`dockyard convert`."""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dockyard.cli.args import DEBUG, JSON, Flag, Given, Verb
from dockyard.cli.terminal import print_data, say
from dockyard.errors import UsageError

if TYPE_CHECKING:
    from dockyard.convert.conversation import Converted
    from dockyard.convert.report import ConversionReport
    from dockyard.convert.sample_files import SampleWriter
    from dockyard.convert.samples import Sample
    from dockyard.gateway.render.renderer import Renderer

FORMATS = (".json", ".jsonl", ".parquet", ".pt")


def _convert(given: Given) -> int:
    """Convert, and print the report. The exit code is 1 when nothing could be converted; then nothing is written."""
    flags = given.flags
    wanted = _Wanted(flags.source, flags.output, flags.traces, flags.text)
    wanted.check(flags.tokenizer)
    _refuse_samples(flags.source)
    from dockyard.convert.read import unfinished
    from dockyard.convert.report import ConversionReport
    from dockyard.convert.tokenize import load_renderer

    renderer = load_renderer(flags.tokenizer) if flags.tokenizer else None
    report = ConversionReport()
    with suppress(_NothingConvertedError):
        wanted.write(renderer, report)
    if flags.json:
        print_data(json.dumps(report.summary(), indent=2) + "\n")
    say(report.table())
    if notice := unfinished(flags.source):
        say(notice)
    wanted.say_files(report, renderer)
    return 0 if wanted.is_met(report) else 1


class _NothingConvertedError(Exception):
    """Raised so that the output files are left as they were."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    source: Path
    output: Path | None
    traces: Path | None
    text: bool

    def check(self, tokenizer: str | None) -> None:
        """Refuse mistakes before the first trial is read."""
        if self.output and self.output.suffix not in FORMATS:
            hint = f"choose the format by the file extension: {', '.join(FORMATS)}"
            raise UsageError(f"`--output {self.output}` has no known file extension", hint=hint)
        if self.traces and self.traces.suffix != ".parquet":
            hint = f"`--traces {self.traces.with_suffix('.parquet')}`"
            raise UsageError(f"`--traces {self.traces}` must end in `.parquet`", hint=hint)
        if self.text and not tokenizer:
            hint = f"`dockyard convert {self.source} --text --tokenizer MODEL`"
            raise UsageError("`--text` needs `--tokenizer`", hint=hint)
        for file in (self.output, self.traces):
            if file and not file.absolute().parent.is_dir():
                raise UsageError(f"`{file.parent}` is not a folder", hint=f"`mkdir -p {file.parent}` creates it")
            if file and file.absolute() == self.source.absolute():
                raise UsageError(f"`{file}` is the source itself and would be overwritten", hint="choose another name")

    def write(self, renderer: "Renderer | None", report: "ConversionReport") -> None:
        """Write samples and traces in one pass over the trials."""
        from dockyard.convert.read import count_trials, read_trials
        from dockyard.convert.sample_files import open_writer
        from dockyard.convert.samples import SampleNumbers, converted_samples
        from dockyard.convert.traces import write_traces

        trials = _shown(read_trials(self.source, renderer, exact=not self.text), count_trials(self.source))
        numbers = SampleNumbers()
        with ExitStack() as stack:
            writer = stack.enter_context(open_writer(self.output)) if self.output else None

            def pass_by() -> "Iterator[Converted]":
                for trial in trials:
                    report.add(trial)
                    if writer:
                        report.samples += _write(writer, converted_samples(trial, numbers, renderer))
                    yield trial
                if self.traces and not report.worded:
                    raise _NothingConvertedError

            if self.traces:
                with suppress(_NothingConvertedError):
                    write_traces(self.traces, pass_by())
            else:
                deque(pass_by(), maxlen=0)
            if self.output and not report.converted:
                raise _NothingConvertedError

    def is_met(self, report: "ConversionReport") -> bool:
        """Whether something was written or, if no file is named, could be."""
        has_samples = bool(report.converted) and (self.output is not None or self.traces is None)
        return has_samples or (self.traces is not None and bool(report.worded))

    def say_files(self, report: "ConversionReport", renderer: "Renderer | None") -> None:
        """Say where the result is, or which flag would produce one."""
        if self.output and report.converted:
            say(f"wrote {report.samples:,} samples to {self.output}")
            if renderer is None:
                say("without `--tokenizer` their `prompt` and `response` are empty; `tokens` is complete")
        if self.traces and report.worded:
            say(f"wrote the traces of {report.worded:,} trials to {self.traces}")
        elif self.traces:
            say(f"no traces were written to {self.traces}: no trial has its text")
        if report.skipped["no_tokenizer"] and not self.traces:
            say("`--tokenizer MODEL` converts the trials without token ids")
        elif report.converted and not self.output and not self.traces:
            say("nothing was written: `--output samples.parquet` writes samples, `--traces traces.parquet` traces")


def _refuse_samples(source: Path) -> None:
    from dockyard.convert.sample_files import holds_samples, open_parquet

    if not holds_samples(source):
        return
    if source.suffix == ".parquet":
        open_parquet(source)  # reports a damaged file, whose content is unknown
    hint = f"`dockyard train run.toml --from-job {source}` trains on them"
    raise UsageError(f"`{source}` already holds samples", hint=hint)


def _write(writer: "SampleWriter", samples: "list[Sample]") -> int:
    for sample in samples:
        writer.write(sample)
    return len(samples)


def _shown(trials: "Iterable[Converted]", total: int | None) -> "Iterable[Converted]":
    """Show progress in a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if not console.is_terminal:
        return trials
    return track(trials, "converting", total=total, console=console, transient=True)


VERBS = (
    Verb(
        name="convert",
        about="Convert finished trials to training samples. Token ids are those that were sampled if they are known; "
        "otherwise the text of the agent's trajectory is tokenized with the model's chat template. Only tokens of the "
        "model are trained on. Without `--output` and `--traces`, print what could be converted.",
        act=_convert,
        flags=(
            Flag(
                "source",
                "a Harbor job or trial folder, a run folder, a traces parquet file, or an ATIF trajectory",
                {"metavar": "SOURCE", "type": Path},
            ),
            Flag("--tokenizer", "a model folder or a Hub name", {"metavar": "MODEL"}),
            Flag("--output", f"the file for samples: {', '.join(FORMATS)}", {"metavar": "FILE", "type": Path}),
            Flag("--traces", "the file for traces in Harbor's columns: .parquet", {"metavar": "FILE", "type": Path}),
            Flag("--text", "tokenize the text even where token ids are known"),
            JSON,
            DEBUG,
        ),
    ),
)
