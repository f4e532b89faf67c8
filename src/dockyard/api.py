"""The functions of `import dockyard`: the same work as the commands, from Python.

Each call blocks until the work is done and returns the run. It works in any thread, also while an event loop is
running, as in a notebook. Errors are `DockyardError` with a message and a hint. Hints name the flags of the command
line; the arguments of the functions have the same names: `--overwrite` is `overwrite=True`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from dockyard import process
from dockyard.collect.harbor_env_vars import harbor_environment
from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.reader import Run, load_run
from dockyard.run_dir.resume import Purpose, SplitName
from dockyard.settings.arguments import (
    argument_error,
    choice_argument,
    count_argument,
    flag_argument,
    optional_path,
    path_argument,
)
from dockyard.settings.overrides import Overrides, value_overrides
from dockyard.verbs import (
    RunRequest,
    Work,
    check_extensions,
    evaluation_purpose,
    open_run,
    prepare_evaluation,
    prepare_rollouts,
    prepare_training,
    purpose_to_resume,
    refuse_with_resume,
)

if TYPE_CHECKING:
    from dockyard.convert.samples import Sample
    from dockyard.convert.tokenize import SavedTokenizer

__all__ = ["Run", "convert_job", "evaluate", "load_run", "run_rollouts", "train"]

type Settings = RunConfig | Mapping[str, Any] | Path | str | None
"""A `RunConfig`, a dict of settings, the path of a TOML file, or None for the defaults."""


def train(
    config: Settings = None, *, resume: Path | str | None = None, overwrite: bool = False, **overrides: Any
) -> Run:
    """Train a policy on tasks, as `dockyard train` does.

    `config` is a `RunConfig`, a dict, or the path of a TOML file. Keyword arguments override settings:
    `train("run.toml", steps=3, trainer={"lr": 1e-5})`, or by dotted key `train("run.toml", **{"trainer.lr": 1e-5})`.

    `resume` continues the run in that folder with its own settings; keyword arguments may then change only what
    recorded results do not depend on. `overwrite` first deletes the run that is in `run_dir`.
    """
    call = _Call(function="train", config=config, overrides=overrides, resume=resume, overwrite=overwrite)
    return _run(call, Purpose(verb="train"))


def run_rollouts(
    config: Settings = None,
    *,
    num_tasks: int | None = None,
    harbor_cli: bool = False,
    resume: Path | str | None = None,
    overwrite: bool = False,
    **overrides: Any,
) -> Run:
    """Attempt each training task `grpo.group_size` times without training, as `dockyard rollout` does.

    `num_tasks` limits the tasks to the first ones. `harbor_cli` makes each rollout with a `harbor run` command. The
    other arguments are those of `train`.
    """
    num_tasks = count_argument("num_tasks", num_tasks, hint="`num_tasks=None` takes every task")
    harbor_cli = flag_argument("harbor_cli", harbor_cli)
    call = _Call(function="run_rollouts", config=config, overrides=overrides, resume=resume, overwrite=overwrite)
    return _run(call, Purpose(verb="rollout", num_tasks=num_tasks, harbor_cli=harbor_cli))


def evaluate(
    config: Settings = None,
    *,
    split: SplitName = "heldout",
    adapter: Path | str | None = None,
    resume: Path | str | None = None,
    overwrite: bool = False,
    **overrides: Any,
) -> Run:
    """Attempt each held-out task `eval.samples` times, as `dockyard eval` does.

    The `summary` of the returned run has the results: `scores` over all tasks and `kinds` per kind of task, each with
    `passes` (pass@k by k) and `reward` as a mean with a 95 % confidence interval. `scores` is None if every rollout was
    lost.

    `split="train"` takes the training tasks. `adapter` is the folder of a LoRA adapter to evaluate the model with, such
    as `Run.adapter`. Unless `run_dir` is a keyword argument, the run folder is that of the settings with `-eval`
    appended. The other arguments are those of `train`.
    """
    choice_argument("split", split, get_args(SplitName.__value__))
    folder = optional_path("adapter", adapter, hint="name the folder of a LoRA adapter, e.g. `adapter=run.adapter`")
    call = _Call(function="evaluate", config=config, overrides=overrides, resume=resume, overwrite=overwrite)
    return _run(call, evaluation_purpose(split, folder))


def convert_job(
    path: Path | str,
    tokenizer: "Path | str | SavedTokenizer | None" = None,
    *,
    output: Path | str | None = None,
    text: bool = False,
) -> "list[Sample]":
    """Convert finished attempts to training samples, as `dockyard convert` does.

    `path` is a Harbor job or trial folder, a run folder, a traces parquet, or an ATIF trajectory. `tokenizer` is a
    model folder, a name on the Hub, or a tokenizer of `transformers`; without one, only attempts with recorded token
    ids are converted. `text` tokenizes the text of all attempts, even where token ids were recorded. `output` is a file
    to write the samples to: `.json`, `.jsonl`, `.parquet` or `.pt`.

    Raise DockyardError if nothing could be converted; then no file is written.
    """
    source = path_argument("path", path, hint='name a folder or a file, e.g. `convert_job("jobs/NAME")`')
    target = optional_path("output", output, hint='name a file, e.g. `output="samples.jsonl"`')
    flag_argument("text", text)
    with harbor_environment():
        from dockyard.convert.read import read_trials
        from dockyard.convert.report import ConversionReport
        from dockyard.convert.sample_files import open_writer
        from dockyard.convert.samples import SampleNumbers, converted_samples
        from dockyard.convert.tokenize import load_renderer

        if text and tokenizer is None:
            raise UsageError("`text` needs `tokenizer`", hint='`convert_job(path, tokenizer="MODEL", text=True)`')
        renderer = load_renderer(tokenizer) if tokenizer is not None else None
        report, numbers = ConversionReport(), SampleNumbers()
        samples: list[Sample] = []
        for attempt in read_trials(source, renderer, exact=not text):
            report.add(attempt)
            samples += converted_samples(attempt, numbers, renderer)
        if not report.converted:
            hint = "`tokenizer=MODEL` converts attempts without token ids" if tokenizer is None else "check the path"
            raise DockyardError(f"nothing in `{path}` could be converted:\n{report.table()}", hint=hint)
        if target is not None:
            with open_writer(target) as writer:
                for sample in samples:
                    writer.write(sample)
        return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The arguments of a function that makes a run."""

    function: str
    config: Settings
    overrides: Mapping[str, Any]
    resume: Path | str | None
    overwrite: bool

    def request(self, purpose: Purpose) -> RunRequest:
        """Return the run to start or to resume. Raise UsageError if an argument contradicts `resume`."""
        overwrite = flag_argument("overwrite", self.overwrite)
        resume = optional_path("resume", self.resume, hint="name the folder of the run to continue")
        overrides = value_overrides(RunConfig, self.overrides, f"in the arguments of `{self.function}`")
        if resume is not None:
            self._refuse_with_resume(purpose)
            return RunRequest(resume=resume, overrides=overrides)
        toml, given = self._source()
        both = Overrides((*given.patches, *overrides.patches), (*given.problems, *overrides.problems))
        return RunRequest(toml=toml, overrides=both, overwrite=overwrite)

    def _source(self) -> tuple[Path | None, Overrides]:
        """Return the file of settings, or the settings that were passed instead of one."""
        example = f'`{self.function}("run.toml", steps=3)`'
        if self.config is None:
            return None, Overrides()
        if isinstance(self.config, Path | str):
            return path_argument("config", self.config, hint=example), Overrides()
        given = self.config.model_dump(exclude_unset=True) if isinstance(self.config, RunConfig) else self.config
        if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise argument_error(
                "config", given, "a `RunConfig`, a dict of settings, or the path of a TOML file", hint=example
            )
        return None, value_overrides(RunConfig, given, f"in the `config` of `{self.function}`")

    def _refuse_with_resume(self, purpose: Purpose) -> None:
        own = {"config": self.config is not None, "overwrite": self.overwrite}
        refuse_with_resume(own, resume="resume", hint="a resumed run has its own settings and folder")
        default = dict(Purpose(verb=purpose.verb))
        changed = {name: value != default[name] for name, value in purpose}
        refuse_with_resume(changed, resume="resume", hint="a resumed run keeps the arguments that it was started with")


def _run(call: _Call, purpose: Purpose) -> Run:
    with harbor_environment():
        return process.blocking(lambda: _carry_out(call, purpose))


def _carry_out(call: _Call, purpose: Purpose) -> Run:
    request = call.request(purpose)
    purpose = purpose_to_resume(request.resume, purpose) or purpose
    if purpose.verb == "eval":
        request = request.for_evaluation(purpose, folder_is_given="run_dir" in call.overrides)
    settings = request.load()
    check_extensions(settings.config, purpose, trains_here=True)
    work = _prepare(settings.config, purpose)
    with open_run(settings, purpose) as run:
        work(run)
    return load_run(run.path)


def _prepare(config: RunConfig, purpose: Purpose) -> Work:
    if purpose.verb == "train":
        return prepare_training(config)
    return prepare_evaluation(config, purpose) if purpose.verb == "eval" else prepare_rollouts(config, purpose)
