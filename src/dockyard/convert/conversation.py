"""What conversion passes on: a conversation as text, and what became of one trial."""

import json
from dataclasses import dataclass, replace

from dockyard.gateway.calls import RAW
from dockyard.gateway.history import ASSISTANT, Json, Message
from dockyard.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One history of an agent, from its first message to its last."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()
    sampled: frozenset[int] | None = None
    """Which assistant messages the model said in this conversation, by their place. None: all of them.

    Others are context: copied from an earlier history, or examples of the agent's own.
    """
    cut: frozenset[int] = frozenset()
    """Of the model's messages those that a token limit cut: nobody sampled an end for them."""
    name: str = ""
    """Empty for the agent's own history; else the subagent or the summary it belongs to."""

    @property
    def replies(self) -> tuple[int, ...]:
        """The places of the model's own messages, in order."""
        spoken = (place for place, message in enumerate(self.messages) if message.role == ASSISTANT)
        return tuple(place for place in spoken if self.sampled is None or place in self.sampled)


def without_malformed(conversation: Conversation) -> Conversation:
    """Calls whose arguments are no JSON cannot be shown as the model wrote them: what it said there becomes context."""
    said = conversation.replies
    kept = frozenset(p for p in said if not any(RAW in call.arguments for call in conversation.messages[p].calls))
    return conversation if len(kept) == len(said) else replace(conversation, sampled=kept)


def group_name(task: str, agent: str, model: str) -> str:
    """Attempts at one task by one agent with one model: others are no measure for each other."""
    return json.dumps([task, agent, model])


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What became of one recorded attempt."""

    where: str
    """The trial's folder, or the file and row it was read from."""
    trial: str
    agent: str
    model: str
    rollout: Rollout
    """With segments unless it was skipped."""
    group: str = ""
    """What its rewards are compared within; empty: the attempts at its task. See `group_name`."""
    conversations: tuple[Conversation, ...] = ()
    """What was said, where the text is known; also of trials whose segments are exact."""
    exact: bool = False
    """The ids are those that were sampled. False: text, tokenised anew."""
    skipped: str | None = None
    """Why it is no training data, in one word, e.g. `no_trajectory`; `detail` says more."""
    detail: str = ""
    notes: tuple[str, ...] = ()
    """What a reader of the samples should know, in one word each, e.g. `no_tool_definitions`."""
