"""The nouns of Dockyard as frozen data. This module imports nothing else of Dockyard, and no torch."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

type IntArray = npt.NDArray[np.int32]
type FloatArray = npt.NDArray[np.float32]
type BoolArray = npt.NDArray[np.bool_]
type Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A Harbor task folder."""

    name: str
    path: Path
    kind: str
    """`[metadata] kind` of its task.toml; results are averaged per kind first. Empty when the task names none."""
    agent_timeout_s: float | None = None
    """`[agent] timeout_sec` of its task.toml."""
    build_timeout_s: float = 600.0
    """`[environment] build_timeout_sec` of its task.toml."""
    verifier_timeout_s: float = 600.0
    """`[verifier] timeout_sec` of its task.toml."""


class Finish(StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"
    """The policy sampled a stop token, which is the last of the sampled ids."""
    LENGTH = "length"
    """The token limit or the end of the context cut the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call inside a rollout: what the engine saw and what it sampled."""

    prompt_ids: IntArray
    sampled_ids: IntArray
    logprobs: FloatArray
    """Of each sampled id, under the distribution it was drawn from."""
    versions: IntArray
    """The weight version that drew each sampled id."""
    finish: Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One unbroken token sequence the model saw, with the tokens it sampled marked.

    A rollout has several only when the agent rewrote its history (compaction, subagents).
    """

    token_ids: IntArray
    sampled: BoolArray
    """True where the policy drew the token. Only these are trained on."""
    logprobs: FloatArray | None
    """Under the weights that drew the token, 0 where not sampled; None when nobody recorded them."""
    versions: IntArray | None
    """The weight version that drew each token, -1 where not sampled; None when nobody recorded them."""


LIMITS = frozenset({"context_overflow", "output_limit", "model_limit", "agent_timeout", "rollout_timeout"})
"""The causes of failure that say a rollout was ended by a limit of time or tokens."""


class Blame(StrEnum):
    """Whose fault a failure is, which decides what becomes of its rollout."""

    INFRASTRUCTURE = "infrastructure"
    """The policy cannot have caused it: tried again, and dropped from its group if it persists."""
    POLICY = "policy"
    """The policy can have caused it: the rollout keeps its verified reward, or 0 when there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong in one rollout."""

    cause: str
    """One word of the table in `rollout/blame.py`, e.g. `agent_timeout`."""
    blame: Blame
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt of one task by one agent."""

    task: str
    kind: str
    attempt: int
    """Which of the group's rollouts this is, from 0."""
    segments: tuple[Segment, ...]
    reward: float | None
    """None exactly when the rollout is dropped from its group."""
    failure: Failure | None
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Wall time by phase: environment, agent, verifier, total."""
    stats: dict[str, int] = field(default_factory=dict[str, int])
    """What the gateway counted: calls, prompt tokens, sampled tokens, splices, branches by reason."""
    untrusted: tuple[Segment, ...] = ()
    """Sampled for calls that the harness did not make. Never trained on."""
    exchanges: tuple[dict[str, Any], ...] = ()
    """Text mode, instead of segments: each call's messages, tools, reply and usage as chat completions have them."""

    @property
    def cut_short(self) -> bool:
        """Whether a limit of time or tokens ended it: one that failed it, or that of its last reply."""
        failed = self.failure is not None and self.failure.cause in LIMITS
        return failed or bool(self.stats.get("cut_at_end"))

    @property
    def num_sampled(self) -> int:
        """Tokens the policy drew in this rollout."""
        return sum(int(segment.sampled.sum()) for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one task in one step."""

    task: str
    rollouts: tuple[Rollout, ...]
    spare: bool = False
    """Made because another group of its step taught nothing."""


def common_prefix(left: IntArray, right: IntArray) -> int:
    """How many tokens two sequences begin with in common."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
