"""The functions of `import dockyard`: the same work as the commands, from Python.

Each call blocks until the work is done and returns the run. It works in any thread, also while an event loop is
running, as in a notebook. Errors are `DockyardError` with a message and a hint.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dockyard import process
from dockyard.collect.harbor_env_vars import harbor_environment
from dockyard.config import Config, RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.reader import Run, load_run
from dockyard.run_dir.resume import Purpose, SplitName
from dockyard.run_dir.run import ResumedRun
from dockyard.settings.load import load, load_run_config
from dockyard.settings.text import settings_by_key

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
    return _run(_Call(config, overrides, resume, overwrite), Purpose(verb="train"))


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
    if num_tasks is not None and num_tasks < 1:
        raise UsageError(f"`num_tasks` is {num_tasks}; it must be at least 1", hint="`None` takes every task")
    purpose = Purpose(verb="rollout", num_tasks=num_tasks, harbor_cli=harbor_cli)
    return _run(_Call(config, overrides, resume, overwrite), purpose)


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
    purpose = Purpose(verb="eval", split=split, adapter=Path(adapter).absolute() if adapter else None)
    call = _Call(config, overrides, resume, overwrite)
    return _run(call if resume else call.for_evaluation(split), purpose)


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
        for attempt in read_trials(Path(path), renderer, exact=not text):
            report.add(attempt)
            samples += converted_samples(attempt, numbers, renderer)
        if not report.converted:
            hint = "`tokenizer=MODEL` converts attempts without token ids" if tokenizer is None else "check the path"
            raise DockyardError(f"nothing in `{path}` could be converted:\n{report.table()}", hint=hint)
        if output is not None:
            with open_writer(Path(output)) as writer:
                for sample in samples:
                    writer.write(sample)
        return samples


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a function that makes a run."""

    config: Settings
    overrides: Mapping[str, Any]
    resume: Path | str | None
    overwrite: bool

    def check(self) -> None:
        if self.resume is not None and (self.config is not None or self.overwrite):
            culprit = "config" if self.config is not None else "overwrite"
            hint = "a resumed run has its own settings and folder"
            raise UsageError(f"`{culprit}` does not go with `resume`", hint=hint)

    def for_evaluation(self, split: SplitName) -> "_Call":
        """Choose a run folder beside that of the training run, and the tasks of the split."""
        toml, words = self._source()
        config = load(RunConfig, toml, words)
        more: dict[str, Any] = {}
        if "run_dir" not in self.overrides:
            more["run_dir"] = f"{config.run_dir}-eval"
        if split == "train" and config.tasks.source == "folder" and config.tasks.train:
            more["tasks.heldout"] = config.tasks.train
        return replace(self, overrides={**self.overrides, **more})

    def read(self) -> tuple[RunConfig, ResumedRun | None]:
        """Load the settings, of a run to continue from its folder."""
        self.check()
        if self.resume is not None:
            resumed = ResumedRun.read(Path(self.resume), list(setting_words(self.overrides)))
            return resumed.config, resumed
        return load_run_config(*self._source()), None

    def _source(self) -> tuple[Path | None, list[str]]:
        """Return a file of settings and the settings that override it, as the loader takes them."""
        if isinstance(self.config, Path | str):
            return Path(self.config), list(setting_words(self.overrides))
        given = self.config.model_dump(exclude_unset=True) if isinstance(self.config, RunConfig) else self.config or {}
        return None, [*setting_words(given), *setting_words(self.overrides)]


def _run(call: _Call, purpose: Purpose) -> Run:
    with harbor_environment():
        return process.blocking(lambda: _carry_out(call, purpose))


def _carry_out(call: _Call, purpose: Purpose) -> Run:
    from dockyard.verbs import RunRequest, carry_out, prepare_work, purpose_to_resume

    config, resumed = call.read()
    if resumed:
        _refuse_with_resume(purpose)
        purpose = purpose_to_resume(resumed.path, purpose)
    work = prepare_work(config, purpose)
    request = RunRequest(config=config, purpose=purpose, resumed=resumed, overwrite=call.overwrite)
    return load_run(carry_out(request, work))


def _refuse_with_resume(purpose: Purpose) -> None:
    """A resumed run keeps the arguments with which it started."""
    default = Purpose(verb=purpose.verb)
    given = [name for name, value in purpose if value != dict(default)[name]]
    if given:
        hint = "a resumed run keeps the arguments with which it started"
        raise UsageError(f"`{given[0]}` does not go with `resume`", hint=hint)


def setting_words(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Write settings as the words of a command line, which is what the loader takes."""
    known = settings_by_key(RunConfig)
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Config):
            value = value.model_dump(exclude_unset=True)
        if isinstance(value, Mapping) and value and key not in known:
            yield from setting_words(cast(Mapping[str, Any], value), f"{key}.")
        else:
            yield f"--{key}={_text(value, literal=key not in known)}"


def _text(value: Any, *, literal: bool) -> str:
    """Write one value. A `literal` is a value inside a table, where text needs quotes to stay text."""
    if isinstance(value, str | Path) and not literal:
        return str(value)
    if value is None and not literal:
        return "none"
    return json.dumps(value, default=_plain)


def _plain(value: object) -> object:
    return cast(object, value.item()) if isinstance(value, np.generic) else str(value)  # pyright: ignore[reportUnknownMemberType]
