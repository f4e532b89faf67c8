"""`dockyard convert`."""

import argparse
import json
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dockyard.cli.run_file import AddParser
from dockyard.cli.terminal import print_data, say
from dockyard.errors import UsageError

if TYPE_CHECKING:
    from dockyard.convert.conversation import Converted
    from dockyard.convert.report import ConversionReport
    from dockyard.convert.sample_files import SampleWriter
    from dockyard.convert.samples import Sample
    from dockyard.gateway.render.renderer import Renderer

FORMATS = (".json", ".jsonl", ".parquet", ".pt")


def add(add_parser: AddParser) -> None:
    """Describe the verb."""
    parser = add_parser(
        "convert",
        help="turn finished Harbor jobs into training samples",
        description="Turn finished attempts into training samples: token ids as they were sampled where they are "
        "known, else the text of the agent's trajectory in the model's own template. Only what the model said is "
        "trained on. Without `--output` and `--traces`, say what could be converted.",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        type=Path,
        help="a Harbor job or trial folder, a run folder of ours, a traces parquet, or an ATIF trajectory",
    )
    parser.add_argument("--tokenizer", metavar="MODEL", help="a model folder or a name on the Hub")
    parser.add_argument("--output", metavar="FILE", type=Path, help=f"where samples go: {', '.join(FORMATS)}")
    parser.add_argument("--traces", metavar="FILE", type=Path, help="where traces go, in Harbor's columns: .parquet")
    parser.add_argument("--text", action="store_true", help="tokenise the text even where ids are known")
    parser.add_argument("--json", action="store_true", help="print the report as data")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def act(arguments: argparse.Namespace) -> int:
    """Convert, and print the report. Exit code 1 when nothing could be converted; then nothing is written either."""
    wanted = _Wanted(arguments.source, arguments.output, arguments.traces, arguments.text)
    wanted.check(arguments.tokenizer)
    _refuse_samples(arguments.source)
    from dockyard.convert.report import ConversionReport
    from dockyard.convert.tokenize import load_renderer

    renderer = load_renderer(arguments.tokenizer) if arguments.tokenizer else None
    report = ConversionReport()
    with suppress(_NothingConvertedError):
        wanted.write(renderer, report)
    if arguments.json:
        print_data(json.dumps(report.summary(), indent=2) + "\n")
    from dockyard.convert.read import unfinished

    say(report.table())
    if notice := unfinished(arguments.source):
        say(notice)
    wanted.say_files(report, renderer)
    return 0 if wanted.is_met(report) else 1


class _NothingConvertedError(Exception):
    """Leaves the files as they were."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    source: Path
    output: Path | None
    traces: Path | None
    text: bool

    def check(self, tokenizer: str | None) -> None:
        """What is wrong is said before the first trial is read."""
        if self.output and self.output.suffix not in FORMATS:
            hint = f"the end of the name says the format: {', '.join(FORMATS)}"
            raise UsageError(f"`--output {self.output}` has no known format", hint=hint)
        if self.traces and self.traces.suffix != ".parquet":
            hint = f"`--traces {self.traces.with_suffix('.parquet')}`"
            raise UsageError(f"`--traces {self.traces}` is no parquet file", hint=hint)
        if self.text and not tokenizer:
            hint = f"`dockyard convert {self.source} --text --tokenizer MODEL`"
            raise UsageError("`--text` needs `--tokenizer`", hint=hint)
        for file in (self.output, self.traces):
            if file and not file.absolute().parent.is_dir():
                raise UsageError(f"`{file.parent}` is not a folder", hint=f"`mkdir -p {file.parent}` makes it")
            if file and file.absolute() == self.source.absolute():
                raise UsageError(f"`{file}` would be written over what it is made from", hint="choose another name")

    def write(self, renderer: "Renderer | None", report: "ConversionReport") -> None:
        """Everything in one pass over the trials."""
        from dockyard.convert.read import count_trials, read_trials
        from dockyard.convert.samples import SampleNumbers, converted_samples, open_writer
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
        """Was something written, or could samples be if no file is named?"""
        has_samples = bool(report.converted) and (self.output is not None or self.traces is None)
        return has_samples or (self.traces is not None and bool(report.worded))

    def say_files(self, report: "ConversionReport", renderer: "Renderer | None") -> None:
        """Where the result is, or how there would be one."""
        if self.output and report.converted:
            say(f"wrote {report.samples:,} samples to {self.output}")
            if renderer is None:
                say("without `--tokenizer` their `prompt` and `response` texts are empty; the tokens are there")
        if self.traces and report.worded:
            say(f"wrote the traces of {report.worded:,} trials to {self.traces}")
        elif self.traces:
            say(f"no traces were written to {self.traces}: nothing here has the words of a trial")
        if report.skipped["no_tokenizer"] and not self.traces:
            say("`--tokenizer MODEL` converts the trials that have no ids")
        elif report.converted and not self.output and not self.traces:
            say("nothing was written: `--output samples.parquet` writes samples, `--traces traces.parquet` traces")


def _refuse_samples(source: Path) -> None:
    from dockyard.convert.rollouts import holds_samples
    from dockyard.convert.sample_files import open_parquet

    if not holds_samples(source):
        return
    if source.suffix == ".parquet":
        open_parquet(source)  # says so if it is damaged: then nobody knows what it holds
    hint = f"`dockyard train run.toml --from-job {source}` trains on them"
    raise UsageError(f"`{source}` holds samples already", hint=hint)


def _write(writer: "SampleWriter", samples: "list[Sample]") -> int:
    for sample in samples:
        writer.write(sample)
    return len(samples)


def _shown(trials: "Iterable[Converted]", total: int | None) -> "Iterable[Converted]":
    """The same, with progress in a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if not console.is_terminal:
        return trials
    return track(trials, "converting", total=total, console=console, transient=True)
