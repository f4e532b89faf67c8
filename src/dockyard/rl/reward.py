"""Reward shaping: `grpo.reward` names a function from a finished training rollout to the number it is trained with.

It is called once per rollout, when the rollout is finished, and its result is recorded beside the verifier's reward, so
that a resumed run trains with the same numbers. Held-out evaluations do not call it.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dockyard.config import GRPOConfig
from dockyard.errors import DockyardError
from dockyard.extension import failed_call, load_function
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.render.splice import CallFormat
from dockyard.rl.advantage import as_number
from dockyard.rollout.plan import Attempt
from dockyard.types import Exchange, IntArray, Json, Message, Rollout, Segment, ToolCall

_CALL = "<tool_call>"
"""Is part of every description of tools as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """A finished training rollout: the argument of the function that `grpo.reward` names."""

    task: str
    kind: str
    """`[metadata] kind` of the task's task.toml; empty if it has none."""
    attempt: int
    """The index of the rollout in its group, from 0."""
    reward: float
    """The verifier's reward; 0 if the policy prevented grading."""
    failure: str | None
    """The cause of a failure that the policy can have caused, e.g. `agent_timeout`; None if there was none."""
    cut_short: bool
    """Whether a limit of time or tokens ended the rollout."""
    text: str
    """The whole conversation, with the control tokens of the chat template if the tokens are known."""
    replies: tuple[Message, ...]
    """What the policy said in each model call: `text`, `reasoning` and tool `calls`."""
    num_sampled: int
    """Tokens that the policy sampled."""
    seconds: Mapping[str, float]
    """Wall time by phase: environment, setup, agent, verifier, total."""
    trial_dir: Path
    """Harbor's folder of the trial. Besides `verifier` it has `agent`, the agent's own logs."""

    @property
    def tools(self) -> tuple[ToolCall, ...]:
        """The tool calls of the policy, each with `name` and `arguments`. Agents without tools send text only."""
        return tuple(call for reply in self.replies for call in reply.calls)

    @property
    def verifier_dir(self) -> Path:
        """The folder with the files that the verifier left, e.g. `reward.txt` and `test-stdout.txt`."""
        return self.trial_dir / "verifier"

    def verifier_text(self, name: str) -> str:
        """The text of a file that the verifier left; empty if there is none."""
        folder = os.path.realpath(self.verifier_dir)
        file = Path(os.path.realpath(self.verifier_dir / name))  # a link may lead out of the folder
        inside = file.is_relative_to(folder)
        return file.read_text(errors="replace") if inside and file.is_file() else ""


type RewardFunction = Callable[[FinishedRollout], float]


def verified_reward(rollout: FinishedRollout) -> float:
    """The verifier's reward, unchanged. Shows the signature of a reward function."""
    return rollout.reward


def load_reward(config: GRPOConfig) -> RewardFunction | None:
    """The function that `grpo.reward` names; None if it is not set. A wrong reference or signature is a UsageError."""
    return load_function(config.reward, "grpo.reward", verified_reward) if config.reward else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardShaping:
    """Calls the function of a run."""

    reference: str
    function: RewardFunction
    renderer: Renderer
    trials: Path

    def shape(self, attempt: Attempt, rollout: Rollout) -> Rollout:
        """The rollout with its shaped reward. A result that is not a finite number stops the run."""
        about = f"rollout `{attempt.name}` of task `{rollout.task}`"
        finished = finished_rollout(rollout, self.renderer, self.trials / attempt.name)
        try:
            result: Any = self.function(finished)
        except Exception as error:  # the function is the user's
            raise failed_call(error, self.reference, "grpo.reward", about) from error
        try:
            value = as_number(result)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise DockyardError(
                f"`grpo.reward` is `{self.reference}`, which returned `{result!r}` for {about}",
                hint="it must return a finite number; fix it, then `--resume` the run: what was recorded is kept",
            )
        return replace(rollout, shaped_reward=value)


def open_shaping(config: GRPOConfig, renderer: Renderer, trials: Path) -> RewardShaping | None:
    """What shapes the rewards of a run's training rollouts; None if `grpo.reward` is not set."""
    function = load_reward(config)
    if config.reward is None or function is None:
        return None
    return RewardShaping(reference=config.reward, function=function, renderer=renderer, trials=trials)


def finished_rollout(rollout: Rollout, renderer: Renderer, trial_dir: Path) -> FinishedRollout:
    """The view of a rollout that a reward function gets."""
    replies = (exchange.reply for exchange in rollout.exchanges) if rollout.exchanges else _replies(rollout, renderer)
    sampled = sum(exchange.num_sampled for exchange in rollout.exchanges)
    return FinishedRollout(
        task=rollout.task,
        kind=rollout.kind,
        attempt=rollout.attempt,
        reward=rollout.reward or 0.0,
        failure=rollout.failure.cause if rollout.failure else None,
        cut_short=rollout.cut_short,
        text=_conversation(rollout.exchanges) if rollout.exchanges else renderer.transcript(rollout),
        replies=tuple(replies),
        num_sampled=sampled or rollout.num_sampled,
        seconds=rollout.seconds,
        trial_dir=trial_dir,
    )


def _replies(rollout: Rollout, renderer: Renderer) -> Iterator[Message]:
    for segment in rollout.segments:
        spans = _sampled_spans(segment)
        tools = _tools(segment.token_ids[: spans[0][0]], renderer) if spans else ()
        for start, end in spans:
            yield renderer.message(segment.token_ids[start:end], segment.token_ids[:start], tools)


def _tools(prompt_ids: IntArray, renderer: Renderer) -> tuple[Json, ...]:
    """A placeholder if the prompt of a model without a call format describes tools as text.

    Replies of such a model are searched for calls only if there are tools.
    """
    described = renderer.rendering.tool_calls == CallFormat.PREAMBLE and _CALL in renderer.text(prompt_ids)
    return ({},) if described else ()


def _sampled_spans(segment: Segment) -> list[tuple[int, int]]:
    """Where the policy's turns start and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], segment.sampled, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _conversation(exchanges: Sequence[Exchange]) -> str:
    """The last prompt and its reply as text: agents send the whole history with each call."""
    last = exchanges[-1]
    return "\n\n".join(f"{message.role}: {message.text}" for message in (*last.prompt.messages, last.reply))
