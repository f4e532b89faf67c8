"""Read a finished Harbor job from disk as rollouts.

The model calls of such a job were not recorded by a gateway. Whether the policy was called is derived from the agent's
token counts, or else from whether the agent ran. A failure of the model endpoint is recognised by the type of the
exception only.

Tokens are known only if the agent stored them. Terminus-2 stores the whole prompt of every turn in `rollout_details`. A
prompt need not start with the turn before it: turns that were cut at the token limit are missing, histories are
summarised, reasoning is dropped. `stitch_turns` compares the ids and starts a new segment where a prompt does not
continue an earlier turn.
"""

# pyright: reportMissingTypeStubs=false

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from harbor import AgentContext, TrialResult
from harbor.models.agent.rollout_detail import RolloutDetail
from harbor.models.trial.config import AgentConfig, TaskConfig
from harbor.models.trial.error_policy import ERROR_POLICIES, FailureCause, policy_for
from pydantic import BaseModel, Field, ValidationError

from dockyard.errors import DockyardError
from dockyard.gateway.accounting import Recording
from dockyard.gateway.token_tree import stitch_turns
from dockyard.rollout.blame import BY_EXCEPTION
from dockyard.rollout.outcome import Outcome, outcome_of, rollout_of
from dockyard.rollout.plan import Place
from dockyard.tasks.folder import load_tasks
from dockyard.types import Blame, Failure, Rollout, Segment, Turn

logger = logging.getLogger(__name__)

_RESULT, _CONFIG = "result.json", "config.json"
CALL_NO_MODEL = ("oracle", "nop")
_OF_TRIALS = ("trial.log", "agent", "verifier", "steps")
_DEPTH = 2
"""How many levels below a folder trials are searched."""
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


def read_job(folder: Path) -> list[Rollout]:
    """Return a rollout for each trial in the folder, sorted by task and time. One that cannot be read has a failure."""
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
    """Read the result that Harbor writes at the end of a trial. It is missing if Harbor was killed before."""
    file = trial / _RESULT
    try:
        return TrialResult.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return Failure(cause="cancelled", blame=Blame.INFRASTRUCTURE, message=f"`{trial}` has no `{_RESULT}`")
    except OSError as error:
        reason = error.strerror
    except ValidationError as error:
        # Harbor redacts the model's key in all files of a trial, and a short key also matches other text.
        reason = error.errors()[0]["msg"]
    return Failure(cause="host_error", blame=Blame.INFRASTRUCTURE, message=f"`{file}` cannot be read: {reason}")


def recording_of(result: TrialResult) -> Recording:
    """Return what is known about the model calls of a trial that ran without a gateway."""
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
    """Whether a word is the name of an exception type, judging by the word alone."""
    is_known = name in BY_EXCEPTION or name in ERROR_POLICIES
    return is_known or (name.isidentifier() and name.endswith(("Error", "Exception")))


def rollout_of_exception(place: Place, exception: str, reward: float | None) -> Rollout:
    """Return the rollout of an attempt of which only the exception type is known. Assumes that it called the model."""
    recording = Recording(stats={}, calls=1, answered=1, engine_failure=_engine_failure(exception, ""))
    return rollout_of(place, Outcome(reward=reward, exception=exception), recording)


def _engine_failure(exception: str, message: str) -> str | None:
    is_providers = policy_for(exception).cause is FailureCause.MODEL_PROVIDER_FAILED
    return f"{exception}: {message}" if is_providers else None


def trial_folders(folder: Path) -> list[Path]:
    """Return the folder itself if it is a trial, otherwise the trials in it and in the jobs that it contains."""
    if not folder.is_dir():
        raise DockyardError(f"`{folder}` is not a folder", hint="pass the folder of a Harbor job, e.g. `jobs/NAME`")
    trials = [folder] if _is_trial(folder) else _trials_in(folder)
    if not trials:
        hint = "pass a folder that `harbor run` wrote: it contains trial folders with a `result.json` each"
        raise DockyardError(f"`{folder}` contains no trials", hint=hint)
    return trials


def _trials_in(folder: Path, depth: int = 0) -> list[Path]:
    """Return the trials in the folder and below, because a run keeps jobs in folders of its own."""
    found: list[Path] = []
    for inside in sorted(path for path in folder.iterdir() if path.is_dir()):
        below = [] if depth == _DEPTH or _is_trial(inside) else _trials_in(inside, depth + 1)
        found += below or ([inside] if (inside / _CONFIG).exists() else [])
    return found


def _is_trial(folder: Path) -> bool:
    """Whether it is a trial. A job also has a `config.json`, but no files of an agent."""
    return (folder / _CONFIG).exists() and any((folder / name).exists() for name in _OF_TRIALS)


def rollout_of_trial(result: TrialResult | Failure, name: str, attempt: int) -> Rollout:
    """Return the rollout of a trial. One that neither failed nor was graded has no reward."""
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
    """Return the name of the task's folder. Harbor names a trial `<the task's first letters>__<letters>`."""
    if not isinstance(result, Failure):
        return result.task_id.get_name()
    try:
        return read_setup(trial).task.get_task_id().get_name()
    except (OSError, ValueError):
        return trial.name.rpartition("__")[0] or trial.name


class Setup(BaseModel):
    """The settings of a trial."""

    task: TaskConfig
    agent: AgentConfig = Field(default_factory=AgentConfig)


def read_setup(trial: Path) -> Setup:
    """Read the settings, which Harbor writes before the trial begins. Raises OSError, or ValueError."""
    return Setup.model_validate_json((trial / _CONFIG).read_bytes())


def _kind(result: TrialResult) -> str:
    """Return the kind of the task; empty if the task's folder was moved."""
    folder = result.task_id.get_local_path()
    try:
        return load_tasks(folder)[0].kind if (folder / "task.toml").is_file() else ""
    except DockyardError:
        return ""


def _contexts(result: TrialResult) -> list[AgentContext]:
    steps = [step.agent_result for step in result.step_results or []]
    return [context for context in (result.agent_result, *steps) if context is not None]


def _num_calls(result: TrialResult, details: Sequence[RolloutDetail], sampled_tokens: int | None) -> int:
    """Return a lower bound of the number of model calls. An agent that ran without counting counts as one call."""
    if result.agent_info.name in CALL_NO_MODEL:
        return 0
    if details:
        return num_turns(details)
    if sampled_tokens is not None:
        return min(sampled_tokens, 1)
    ran = [result.agent_execution, *(step.agent_execution for step in result.step_results or [])]
    return int(any(phase and phase.started_at for phase in ran))


def stored_turn(prompt: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float] | None = None) -> Turn:
    """Return a turn from stored lists. Logprobs are dropped if their number does not fit, or one is not finite."""
    fits = logprobs is not None and len(logprobs) == len(sampled) and bool(np.isfinite(logprobs).all())
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.array(logprobs, np.float32) if fits else None,
    )


def segments_of(details: Sequence[RolloutDetail]) -> tuple[Segment, ...]:
    """Return the segments of the main chat, then of the summarisations. Weight versions are not known."""
    return tuple(segment for detail in details for segment in stitch_turns(_turns(detail)))


def num_turns(details: Sequence[RolloutDetail]) -> int:
    """Return the number of model replies in the details."""
    return sum(max(map(len, (d.get("prompt_token_ids", []), d.get("completion_token_ids", [])))) for d in details)


def _turns(detail: RolloutDetail) -> list[Turn]:
    """Return the turns; none if prompts and replies cannot be paired, because Harbor fills each list independently."""
    prompts, sampled = detail.get("prompt_token_ids", []), detail.get("completion_token_ids", [])
    if len(prompts) != len(sampled):
        return []
    logprobs = detail.get("logprobs", [])
    aligned = [*map(len, logprobs)] == [*map(len, sampled)]  # if one does not fit, the others may be shifted
    known = logprobs if aligned else [None] * len(sampled)
    turns = zip(prompts, sampled, known, strict=True)
    return [stored_turn(prompt, ids, logs) for prompt, ids, logs in turns if ids]
