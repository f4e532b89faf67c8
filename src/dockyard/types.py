"""The core data types of Dockyard, all frozen. This module imports no other part of Dockyard, and no torch."""

import json
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
    """`[metadata] kind` of its task.toml. Results are averaged per kind first. Empty if the task has none."""
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
    """The turn reached the token limit or the end of the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call inside a rollout: what the engine was given and what it sampled."""

    prompt_ids: IntArray
    sampled_ids: IntArray
    logprobs: FloatArray | None = None
    """Of each sampled id, under the distribution it was drawn from. None if they were not recorded."""
    versions: IntArray | None = None
    """The weight version that drew each sampled id. None if it was not recorded."""
    finish: Finish = Finish.STOP


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One unbroken token sequence that the model saw, with the tokens it sampled marked.

    A rollout has several only if the agent rewrote its history (compaction, subagents).
    """

    token_ids: IntArray
    sampled: BoolArray
    """True where the policy drew the token. Only these tokens are trained on."""
    logprobs: FloatArray | None
    """Under the weights that drew the token, 0 where not sampled. None if they were not recorded."""
    versions: IntArray | None
    """The weight version that drew each token, -1 where not sampled. None if it was not recorded."""


ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A request by the policy that the agent run a tool."""

    id: str
    """Made by Dockyard if the policy made the call. It is the one thing that every agent sends back unchanged."""
    name: str
    arguments: Json
    """A JSON object. Compare objects, not text: agents reorder keys and write numbers and escapes differently."""

    def arguments_json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a history, the same in every wire dialect."""

    role: str
    """system, user, assistant or tool."""
    text: str
    reasoning: str = ""
    """The assistant's reasoning before its text. Also empty if the agent left it out."""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    """The tool call that a tool message answers."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model call asks the policy to continue: a history, and the tools that the policy may use."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()
    """Functions in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    auxiliary: bool = False
    """True for a side call of the agent (a title, a structured answer without tools), which is not part of the task."""

    @property
    def system(self) -> str:
        first = self.messages[0]
        return first.text if first.role == "system" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One model call in text mode, where token ids are not known: the prompt and the reply as text."""

    prompt: Prompt
    reply: Message
    finish: Finish
    num_prompt: int = 0
    """Prompt tokens as the endpoint counted them. 0 if they were not counted."""
    num_sampled: int = 0
    """Sampled tokens as the endpoint counted them. 0 if they were not counted."""
    delivered: bool = True
    """Whether the reply reached the agent."""


LIMITS = frozenset({"context_overflow", "output_limit", "model_limit", "agent_timeout", "rollout_timeout"})
"""The causes of failure that mean that a limit of time or tokens ended the rollout."""


class Blame(StrEnum):
    """Who is responsible for a failure. It decides whether its rollout is kept."""

    INFRASTRUCTURE = "infrastructure"
    """The policy cannot have caused it. The rollout is retried, and dropped from its group if the failure persists."""
    POLICY = "policy"
    """The policy can have caused it. The rollout keeps its verified reward, or gets 0 if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong in one rollout."""

    cause: str
    """A name from the table in `rollout/blame.py`, e.g. `agent_timeout`."""
    blame: Blame
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt of one task by one agent."""

    task: str
    kind: str
    attempt: int
    """The index of this rollout in its group, from 0."""
    segments: tuple[Segment, ...]
    reward: float | None
    """What the verifier said. None if, and only if, the rollout is dropped from its group."""
    failure: Failure | None
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Wall time by phase: environment, agent, verifier, total."""
    stats: dict[str, int] = field(default_factory=dict[str, int])
    """The gateway's counters: calls, prompt tokens, sampled tokens, splices, branches by reason."""
    untrusted: tuple[Segment, ...] = ()
    """Segments of calls that the agent's harness did not make. They are never trained on."""
    exchanges: tuple[Exchange, ...] = ()
    """The model calls of a text-mode rollout, which has no segments."""
    shaped_reward: float | None = None
    """What `grpo.reward` returned for a training rollout; None if the run has no such function."""

    @property
    def training_reward(self) -> float | None:
        """The reward that advantages are computed from: the shaped one if there is one, else the verifier's."""
        return self.reward if self.shaped_reward is None else self.shaped_reward

    @property
    def cut_short(self) -> bool:
        """Whether a limit of time or tokens ended the rollout: as its failure, or in its last reply."""
        failed = self.failure is not None and self.failure.cause in LIMITS
        return failed or bool(self.stats.get("cut_at_end"))

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the policy drew in this rollout."""
        return sum(int(segment.sampled.sum()) for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one task in one step."""

    task: str
    rollouts: tuple[Rollout, ...]
    spare: bool = False
    """True if it was made to replace a group of the same step that gives no gradient."""


def common_prefix(left: IntArray, right: IntArray) -> int:
    """The length of the longest common prefix of two token sequences."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
