"""A finished Harbor job on disk becomes rollouts.

Nobody recorded the model calls of such a job. Tokens are there only where the agent kept them; whether the policy was
ever asked is told by what the agent counted, and where that says nothing, by whether the agent ran. A failing model
endpoint is known by the type of error only.
"""

# pyright: reportMissingTypeStubs=false

import logging
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from harbor import AgentContext, TrialResult
from harbor.models.agent.rollout_detail import RolloutDetail
from harbor.models.trial.error_policy import FailureCause, policy_for
from pydantic import ValidationError

from dockyard.errors import DockyardError
from dockyard.gateway.ledger import Recording
from dockyard.rollout.details import num_turns, segments_of
from dockyard.rollout.outcome import Place, outcome_of, rollout_of
from dockyard.tasks import load_tasks
from dockyard.types import Blame, Failure, Rollout

logger = logging.getLogger(__name__)

_RESULT, _CONFIG = "result.json", "config.json"
_ASK_NO_MODEL = ("oracle", "nop")
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


def read_job(folder: Path) -> list[Rollout]:
    """A rollout for each trial in the folder, by task and time. What a trial left unreadable is a failure on it."""
    trials = _trial_folders(folder)
    if not trials:
        hint = "a job is a folder that `harbor run` wrote: trial folders with a `result.json` each"
        raise DockyardError(f"`{folder}` holds no trials", hint=hint)
    results = [(trial, read_result(trial)) for trial in trials]
    results.sort(key=lambda pair: _order(*pair))
    seen: Counter[str] = Counter()
    rollouts: list[Rollout] = []
    for trial, result in results:
        name = _task_name(trial, result)
        rollouts.append(_rollout(result, name, seen[name]))
        seen[name] += 1
    return rollouts


def read_result(trial: Path) -> TrialResult | Failure:
    """What Harbor wrote when the trial was over. It is missing if Harbor was killed before."""
    file = trial / _RESULT
    try:
        return TrialResult.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return Failure(cause="cancelled", blame=Blame.INFRASTRUCTURE, message=f"`{trial}` has no `{_RESULT}`")
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
    provider = error and policy_for(error.exception_type).cause is FailureCause.MODEL_PROVIDER_FAILED
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
        engine_failure=f"{error.exception_type}: {error.exception_message}" if error and provider else None,
    )


def _trial_folders(folder: Path) -> list[Path]:
    """The folder itself if it is a trial. A job has a `config.json` of its own, and no `trial.log`."""
    if not folder.is_dir():
        raise DockyardError(f"`{folder}` is not a folder", hint="name the folder of a Harbor job, e.g. `jobs/NAME`")
    if (folder / "trial.log").exists():
        return [folder]
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and (path / _CONFIG).exists()]


def _rollout(result: TrialResult | Failure, name: str, attempt: int) -> Rollout:
    if isinstance(result, Failure):
        logger.warning("%s", result.message)
        return Rollout(task=name, kind="", attempt=attempt, segments=(), reward=None, failure=result)
    place = Place(task=name, kind=_kind(result), attempt=attempt)
    return rollout_of(place, outcome_of(result), recording_of(result))


def _order(trial: Path, result: TrialResult | Failure) -> tuple[str, datetime, str]:
    started = None if isinstance(result, Failure) else result.started_at
    return _task_name(trial, result), started or _LONG_AGO, trial.name


def _task_name(trial: Path, result: TrialResult | Failure) -> str:
    """As task folders are named here. Harbor names a trial `<task>__<letters>`."""
    if isinstance(result, Failure):
        return trial.name.rpartition("__")[0] or trial.name
    return result.task_id.get_name()


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
    if result.agent_info.name in _ASK_NO_MODEL:
        return 0
    if details:
        return num_turns(details)
    if sampled_tokens is not None:
        return min(sampled_tokens, 1)
    ran = [result.agent_execution, *(step.agent_execution for step in result.step_results or [])]
    return int(any(phase and phase.started_at for phase in ran))
