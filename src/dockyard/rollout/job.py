"""A finished Harbor job on disk becomes rollouts.

Nobody recorded the model calls of such a job. Tokens are there only where the agent kept them; whether the policy was
ever asked is told by what the agent counted, and where that says nothing, by whether the agent ran. A failing model
endpoint is known by the type of error only.
"""

# pyright: reportMissingTypeStubs=false

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from harbor import AgentContext, TrialResult
from harbor.models.agent.rollout_detail import RolloutDetail
from harbor.models.trial.config import AgentConfig, TaskConfig
from harbor.models.trial.error_policy import ERROR_POLICIES, FailureCause, policy_for
from pydantic import BaseModel, Field, ValidationError

from dockyard.errors import DockyardError
from dockyard.gateway.accounting import Recording
from dockyard.rollout.blame import BY_EXCEPTION
from dockyard.rollout.details import num_turns, segments_of
from dockyard.rollout.order import Place
from dockyard.rollout.outcome import Outcome, outcome_of, rollout_of
from dockyard.tasks.folder import load_tasks
from dockyard.types import Blame, Failure, Rollout

logger = logging.getLogger(__name__)

_RESULT, _CONFIG = "result.json", "config.json"
ASK_NO_MODEL = ("oracle", "nop")
_OF_TRIALS = ("trial.log", "agent", "verifier", "steps")
_DEPTH = 2
"""How far below a folder its trials may be."""
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


def read_job(folder: Path) -> list[Rollout]:
    """A rollout for each trial in the folder, by task and time. What a trial left unreadable is a failure on it."""
    results = [(trial, read_result(trial)) for trial in trial_folders(folder)]
    results.sort(key=lambda pair: _order(*pair))
    seen: Counter[str] = Counter()
    rollouts: list[Rollout] = []
    for trial, result in results:
        name = task_name(trial, result)
        if isinstance(result, Failure):
            logger.warning("%s", result.message)
        rollouts.append(rollout_of_trial(result, name, seen[name]))
        seen[name] += 1
    return rollouts


def read_result(trial: Path) -> TrialResult | Failure:
    """What Harbor wrote when the trial was over. It is missing if Harbor was killed before."""
    file = trial / _RESULT
    try:
        return TrialResult.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return Failure(cause="cancelled", blame=Blame.INFRASTRUCTURE, message=f"`{trial}` has no `{_RESULT}`")
    except OSError as error:
        message = f"`{file}` cannot be read: {error.strerror}"
        return Failure(cause="host_error", blame=Blame.INFRASTRUCTURE, message=message)
    except ValidationError as error:
        # Harbor blots out the model's key in all files of a trial, and a short key is found everywhere.
        message = f"`{file}` cannot be read: {error.errors()[0]['msg']}"
        return Failure(cause="host_error", blame=Blame.INFRASTRUCTURE, message=message)


def recording_of(result: TrialResult) -> Recording:
    """What is known of the model calls of a trial that no gateway watched."""
    details = [detail for context in _contexts(result) for detail in context.rollout_details or []]
    segments = segments_of(details)
    prompt_tokens, _, sampled_tokens, _ = result.compute_token_cost_totals()
    calls = _num_calls(result, details, sampled_tokens)
    error = result.exception_info
    stats = {
        "calls": calls,
        "prompt_tokens": prompt_tokens,
        "sampled_tokens": sampled_tokens,
        "trained_tokens": sum(int(segment.sampled.sum()) for segment in segments),
    }
    return Recording(
        segments=segments,
        stats={name: count for name, count in stats.items() if count is not None},
        calls=calls,
        answered=calls,
        engine_failure=_engine_failure(error.exception_type, error.exception_message) if error else None,
    )


def is_exception(name: str) -> bool:
    """Whether a word is the type of something that was raised, as far as a word can tell."""
    is_known = name in BY_EXCEPTION or name in ERROR_POLICIES
    return is_known or (name.isidentifier() and name.endswith(("Error", "Exception")))


def rollout_of_exception(place: Place, exception: str, reward: float | None) -> Rollout:
    """An attempt of which only the type of what was raised is known, and that its agent asked the model."""
    recording = Recording(stats={}, calls=1, answered=1, engine_failure=_engine_failure(exception, ""))
    return rollout_of(place, Outcome(reward=reward, exception=exception), recording)


def _engine_failure(exception: str, message: str) -> str | None:
    is_providers = policy_for(exception).cause is FailureCause.MODEL_PROVIDER_FAILED
    return f"{exception}: {message}" if is_providers else None


def trial_folders(folder: Path) -> list[Path]:
    """The folder itself if it is a trial, else those in it and in the jobs that it holds."""
    if not folder.is_dir():
        raise DockyardError(f"`{folder}` is not a folder", hint="name the folder of a Harbor job, e.g. `jobs/NAME`")
    trials = [folder] if _is_trial(folder) else _trials_in(folder)
    if not trials:
        hint = "a job is a folder that `harbor run` wrote: trial folders with a `result.json` each"
        raise DockyardError(f"`{folder}` holds no trials", hint=hint)
    return trials


def _trials_in(folder: Path, depth: int = 0) -> list[Path]:
    """A run keeps jobs inside of folders of its own."""
    found: list[Path] = []
    for inside in sorted(path for path in folder.iterdir() if path.is_dir()):
        below = [] if depth == _DEPTH or _is_trial(inside) else _trials_in(inside, depth + 1)
        found += below or ([inside] if (inside / _CONFIG).exists() else [])
    return found


def _is_trial(folder: Path) -> bool:
    """A job has a `config.json` as well, but nothing of an agent."""
    return (folder / _CONFIG).exists() and any((folder / name).exists() for name in _OF_TRIALS)


def rollout_of_trial(result: TrialResult | Failure, name: str, attempt: int) -> Rollout:
    """The attempt of this number at the task of this name. What neither failed nor was graded has no reward."""
    if isinstance(result, Failure):
        return Rollout(task=name, kind="", attempt=attempt, segments=(), reward=None, failure=result)
    place = Place(task=name, kind=_kind(result), attempt=attempt)
    outcome = outcome_of(result)
    rollout = rollout_of(place, outcome, recording_of(result))
    is_graded = outcome.reward is not None and math.isfinite(outcome.reward)
    return rollout if is_graded or rollout.failure else replace(rollout, reward=None)


def _order(trial: Path, result: TrialResult | Failure) -> tuple[str, datetime, str]:
    started = None if isinstance(result, Failure) else result.started_at
    return task_name(trial, result), started or _LONG_AGO, trial.name


def task_name(trial: Path, result: TrialResult | Failure) -> str:
    """As task folders are named here. Harbor names a trial `<the task's first letters>__<letters>`."""
    if not isinstance(result, Failure):
        return result.task_id.get_name()
    try:
        return read_setup(trial).task.get_task_id().get_name()
    except (OSError, ValueError):
        return trial.name.rpartition("__")[0] or trial.name


class Setup(BaseModel):
    """What a trial was started with."""

    task: TaskConfig
    agent: AgentConfig = Field(default_factory=AgentConfig)


def read_setup(trial: Path) -> Setup:
    """Harbor writes it before the trial begins. Raises OSError, or ValueError."""
    return Setup.model_validate_json((trial / _CONFIG).read_bytes())


def _kind(result: TrialResult) -> str:
    """Known as long as the task's folder is where it was."""
    folder = result.task_id.get_local_path()
    try:
        return load_tasks(folder)[0].kind if (folder / "task.toml").is_file() else ""
    except DockyardError:
        return ""


def _contexts(result: TrialResult) -> list[AgentContext]:
    steps = [step.agent_result for step in result.step_results or []]
    return [context for context in (result.agent_result, *steps) if context is not None]


def _num_calls(result: TrialResult, details: Sequence[RolloutDetail], sampled_tokens: int | None) -> int:
    """At least so many; an agent that ran and counted nothing is taken to have asked once."""
    if result.agent_info.name in ASK_NO_MODEL:
        return 0
    if details:
        return num_turns(details)
    if sampled_tokens is not None:
        return min(sampled_tokens, 1)
    ran = [result.agent_execution, *(step.agent_execution for step in result.step_results or [])]
    return int(any(phase and phase.started_at for phase in ran))
