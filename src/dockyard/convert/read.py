"""Reads recorded attempts one at a time: Harbor jobs and trials, Dockyard runs, traces, single trajectories.

An attempt that cannot be read carries its error, and the others are still read. The token ids that a gateway recorded
in a run are kept exactly.
"""

import logging
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from harbor import TrialResult
from harbor.agents.agent_auth_resolution import SKIP_MODEL_PARSING_PROVIDER
from pydantic import BaseModel, ValidationError

from dockyard.convert.atif import UnreadableError
from dockyard.convert.conversation import Converted, conversations_of, group_name
from dockyard.convert.logs import LOG_IS_BETTER, conversation_from_log, read_completions
from dockyard.convert.sample_files import holds_samples, read_samples
from dockyard.convert.samples import Sample, groups_of
from dockyard.convert.tokenize import Tokeniser, blank, isolate_errors, skip, tokenizer_mismatch
from dockyard.convert.traces import read_trace_file
from dockyard.convert.trajectory import TRAJECTORY, TrajectoryText, read_trajectory_text
from dockyard.errors import DockyardError
from dockyard.gateway.protocol import first_problem
from dockyard.gateway.render.renderer import Renderer
from dockyard.rollout.job import CALL_NO_MODEL, read_result, read_setup, rollout_of_trial, task_name, trial_folders
from dockyard.run_dir.records import from_line
from dockyard.run_dir.run import RunPaths, recorded_files
from dockyard.types import Failure, Group, Rollout

# pyright: reportMissingTypeStubs=false

logger = logging.getLogger(__name__)

_EVALUATIONS = "eval"
_COMPLETIONS = "completions"


def _read_run(path: Path, tokeniser: Tokeniser) -> Iterator[Converted]:
    """The rollouts of all phases. Evaluations are skipped; to convert one, pass its file."""
    files = recorded_files(path)
    if not files:
        raise DockyardError(
            f"`{path}` has no rollouts", hint=f"`dockyard convert {RunPaths(path).trials}` reads its trials"
        )
    for file in files:
        for found in _read_recorded(file, tokeniser):
            is_evaluation = file.stem.startswith(_EVALUATIONS) and found.skipped != "unreadable"
            detail = f"held-out tasks are not trained on; `dockyard convert {file}` converts them"
            yield skip(found, "evaluation", detail) if is_evaluation else found


def _read_recorded(file: Path, tokeniser: Tokeniser) -> Iterator[Converted]:
    """Read one file of rollouts line by line. Of an attempt that was recorded twice, the later line is used."""
    who = _RunNames.of(RunPaths(file.parent.parent).config)
    latest = {key: number for number, line in _lines(file) if (key := _key(line))}
    for number, line in _lines(file):
        key = _key(line)
        if key is None or latest[key] == number:
            where = f"{file} line {number}"
            unknown = blank(where, agent=who.agent, model=who.model)
            yield isolate_errors(unknown, partial(_converted, where, line, who, tokeniser))


@dataclass(frozen=True, slots=True)
class _RunNames:
    """The agent and the model that a run's settings name."""

    agent: str = ""
    model: str = ""

    @classmethod
    def of(cls, config: Path) -> "_RunNames":
        """Empty names if the settings cannot be read, so that the rollouts still can."""
        try:
            settings = tomllib.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls()
        return cls(_name(settings, "agent"), _name(settings, "model"))


def _name(settings: dict[str, Any], section: str) -> str:
    named: object = settings.get(section)
    return str(cast("dict[str, Any]", named).get("name") or "") if isinstance(named, dict) else ""


class _Key(BaseModel, frozen=True):
    group: int
    task: str
    attempt: int


def _key(line: bytes) -> _Key | None:
    try:
        return _Key.model_validate_json(line)
    except ValidationError:
        return None


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The complete lines with their numbers. A last line without a line break is still being written."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                yield number, line


def _converted(where: str, line: bytes, who: _RunNames, tokeniser: Tokeniser) -> Converted:
    try:
        recorded = from_line(line)
        conversations = conversations_of(recorded.rollout.exchanges)
    except (ValidationError, KeyError, TypeError, OverflowError) as error:
        broken = blank(where, agent=who.agent, model=who.model)
        reason = first_problem(error) if isinstance(error, ValidationError) else str(error).splitlines()[0]
        return skip(broken, "unreadable", f"`{where}` is not a rollout: {reason}")
    rollout, group = recorded.rollout, f"{recorded.phase}-{recorded.group:03}"
    found = Converted(
        where=where,
        trial=f"{group}-{rollout.attempt:02}",
        agent=who.agent,
        model=who.model,
        rollout=rollout,
        group=group,
        conversations=conversations,
        detail="the run recorded ids, not text; its `trials` folder has the agent's text" if rollout.segments else "",
    )
    if rollout.failure and rollout.reward is None:
        return skip(found, "no_reward", f"{rollout.failure.cause}: {rollout.failure.message}")
    if not rollout.segments and not conversations:
        return skip(found, "no_model_calls", "there was no model call, or no reply reached the agent")
    return tokeniser.tokenise(found, text=recorded.transcript)


def read_trials(path: Path, renderer: Renderer | None, *, exact: bool = True) -> Iterator[Converted]:
    """Convert each attempt. Without `exact`, stored token ids are not used.

    `path` is a job, a trial, a Dockyard run or a file of its rollouts, an ATIF trajectory, or a parquet file of traces.
    """
    tokeniser = Tokeniser(renderer, exact)
    if not path.exists():
        raise DockyardError(f"`{path}` does not exist", hint="pass the folder of a Harbor job, e.g. `jobs/NAME`")
    if path.is_dir():
        is_run = recorded_files(path) is not None
        yield from _read_run(path, tokeniser) if is_run else _read_job(path, tokeniser)
    elif path.suffix == ".parquet":
        yield from read_trace_file(path, tokeniser)
    elif path.suffix == ".jsonl":
        yield from _read_recorded(path, tokeniser)
    else:
        yield isolate_errors(blank(str(path), trial=path.stem), partial(_read_trajectory, path, tokeniser))


def count_trials(path: Path) -> int | None:
    """The number of attempts; None if counting them would take long."""
    return len(trial_folders(path)) if path.is_dir() and recorded_files(path) is None else None


def unfinished(path: Path) -> str | None:
    """A message that a job is still running; None if it has finished or is not a job."""
    try:
        job = _Job.model_validate_json((path / "result.json").read_bytes())
    except (OSError, ValidationError):
        return None
    return None if job.finished_at else f"the job is not finished: it has {job.n_total_trials:,} trials in all"


class _Job(BaseModel):
    n_total_trials: int
    finished_at: str | None = None


def _read_job(path: Path, tokeniser: Tokeniser) -> Iterator[Converted]:
    seen: Counter[str] = Counter()
    for trial in trial_folders(path):
        yield isolate_errors(blank(str(trial), trial=trial.name), partial(_read_trial, trial, seen, tokeniser))


def _read_trial(trial: Path, seen: Counter[str], tokeniser: Tokeniser) -> Converted:
    """`seen` counts the attempts of each group."""
    result = read_result(trial)
    group = _group(trial, result)
    attempt, seen[group] = seen[group], seen[group] + 1
    found = replace(_found(trial, result, attempt), group=group)
    if isinstance(result, Failure):
        return found
    return isolate_errors(found, partial(_with_text, found, trial, result, tokeniser))


def _group(trial: Path, result: TrialResult | Failure) -> str:
    """The group of a trial, from its result or else its settings. The task's folder is part of it: names may repeat."""
    if isinstance(result, TrialResult):
        who, task = result.config.agent, result.task_id
        agent, model = result.agent_info.name, _model(result)
    else:
        try:
            setup = read_setup(trial)
            who, task = setup.agent, setup.task.get_task_id()
        except (OSError, ValueError):
            return group_name(task_name(trial, result), "", "")
        agent, model = who.name or "", ""
    return group_name(task.model_dump_json(), who.import_path or agent, who.model_name or model)


def _found(trial: Path, result: TrialResult | Failure, attempt: int) -> Converted:
    """How the trial ended, and the tokens that its result contains."""
    task = task_name(trial, result)
    if isinstance(result, Failure):
        still = result.cause == "cancelled"
        detail = f"{result.message}: the trial is still running, or was killed" if still else result.message
        found = replace(blank(str(trial), trial=trial.name), rollout=rollout_of_trial(result, task, attempt))
        return replace(found, skipped="running" if still else "unreadable", detail=detail)
    unknown = blank(str(trial), trial=result.trial_name, task=task, agent=result.agent_info.name, model=_model(result))
    try:
        return replace(unknown, rollout=rollout_of_trial(result, task, attempt))
    except OverflowError:
        found = replace(unknown, rollout=replace(unknown.rollout, attempt=attempt))
        return skip(found, "unreadable", f"`{trial / 'result.json'}` has invalid token ids")


def _model(result: TrialResult) -> str:
    model = result.agent_info.model_info
    if model is None:
        return ""
    is_named = model.provider and model.provider != SKIP_MODEL_PARSING_PROVIDER
    return f"{model.provider}/{model.name}" if is_named else model.name


def _with_text(found: Converted, trial: Path, result: TrialResult, tokeniser: Tokeniser) -> Converted:
    """Add the conversations and the tokens."""
    if found.skipped is None and found.agent in CALL_NO_MODEL:
        return skip(found, "no_model_calls", f"`{found.agent}` calls no model")
    try:
        text = _trajectory_text(trial, result)
    except (UnreadableError, OverflowError) as error:
        if not (found.rollout.segments and tokeniser.exact):
            return skip(found, "unreadable", str(error))
        found, text = replace(found, notes=("trajectory_unreadable",)), TrajectoryText(conversations=())
    return _tokenised(found, text, tokeniser)


def _tokenised(found: Converted, text: TrajectoryText, tokeniser: Tokeniser) -> Converted:
    found = replace(
        found,
        model=found.model or text.model,
        conversations=text.conversations,
        notes=(*found.notes, *sorted(text.notes)),
    )
    if found.skipped is None and found.rollout.reward is None and "no_reward" not in found.notes:
        failure = found.rollout.failure
        reason = f"{failure.cause}: {failure.message}" if failure else "the trial was not graded"
        return skip(found, "no_reward", reason)
    return tokeniser.tokenise(found, text.turns)


def _trajectory_text(trial: Path, result: TrialResult) -> TrajectoryText:
    """The conversations of a trial: from logged model calls, or else a trajectory, or else the agent's own log."""
    steps = [trial / "steps" / step.step_name / "agent" for step in result.step_results or []]
    folders = [folder for folder in (*steps, trial / "agent") if folder.is_dir()]
    logged = [folder / _COMPLETIONS for folder in folders if any((folder / _COMPLETIONS).glob("*.json"))]
    if logged:
        return TrajectoryText.joined(read_completions(folder) for folder in logged)
    trajectories = [file for folder in folders if (file := folder / TRAJECTORY).is_file()]
    text = read_trajectory_text(*trajectories) if trajectories else TrajectoryText(conversations=())
    agent = result.agent_info.name
    if trajectories and agent not in LOG_IS_BETTER:
        return text
    logged_text = conversation_from_log(trial, agent)
    return replace(text, conversations=logged_text, turns=()) if logged_text else text


def _read_trajectory(file: Path, tokeniser: Tokeniser) -> Converted:
    """Convert a single trajectory. Its reward is known if it is in the folder of its trial."""
    trial = file.parent.parent
    result = read_result(trial) if file.parent.name == "agent" else None
    if isinstance(result, TrialResult):
        found = replace(_found(trial, result, 0), where=str(file))
    else:
        found = replace(blank(str(file), trial=file.stem, task=file.stem), notes=("no_reward",))
    try:
        return _tokenised(found, read_trajectory_text(file), tokeniser)
    except (UnreadableError, OverflowError) as error:
        return skip(found, "unreadable", str(error))


def read_groups(path: Path, renderer: Renderer) -> tuple[Group, ...]:
    """The rollouts that can be trained on, in groups by task; those of a Dockyard run also by step.

    `path` is a file of samples, which are used as they are, or anything that `read_trials` converts.
    """
    if holds_samples(path):
        return groups_of(_checked(path, renderer))
    by_group: dict[str, list[Rollout]] = {}
    for converted in _convertible(path, renderer):
        by_group.setdefault(converted.group or converted.rollout.task, []).append(converted.rollout)
    return tuple(Group(task=rollouts[0].task, rollouts=tuple(rollouts)) for rollouts in by_group.values())


def _checked(path: Path, renderer: Renderer) -> Iterator[Sample]:
    """Read samples, and refuse ids of another tokenizer: they would be trained on without an error, or crash later."""
    for sample in read_samples(path):
        why = tokenizer_mismatch([sample.tokens], f"{sample.prompt}\n{sample.response}", renderer)
        if why:
            hint = "set `--model.name` to the model that the samples were made for"
            raise DockyardError(f"sample {sample.index} of `{path}` was made for another model: {why}", hint=hint)
        yield sample


def _convertible(path: Path, renderer: Renderer) -> Iterator[Converted]:
    """The attempts that can be trained on. Others are logged, and counted at the end."""
    left_out: Counter[str] = Counter()
    num_read = 0
    for converted in read_trials(path, renderer):
        num_read += 1
        if converted.skipped:
            left_out[converted.skipped] += 1
            logger.warning("%s: %s%s", converted.where, converted.skipped, converted.detail and f": {converted.detail}")
        else:
            yield converted
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(left_out.items())) or "none"
    logger.info("%d rollouts in %s, left out: %s", num_read, path, reasons)
