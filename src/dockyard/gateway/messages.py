"""A conversation as the gateway knows it, the same whatever dialect the agent speaks."""

import json
from dataclasses import dataclass, field

from dockyard.types import Json

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The policy asks the agent to run a tool."""

    id: str
    """Ours if we made the call: the one thing every agent echoes unchanged."""
    name: str
    arguments: Json
    """A JSON object. Compared as such: agents reorder keys and write numbers and escapes their own way."""

    def arguments_json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a history."""

    role: str
    """system, user, assistant or tool."""
    text: str
    reasoning: str = ""
    """What an assistant thought before it spoke; empty also when the agent left it out."""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    """The call that a tool's message answers."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a call asks the policy to continue: a history, and the tools it may use."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = field(default=())
    """Functions as OpenAI writes them: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    auxiliary: bool = False
    """A side call of the agent (a title, a structured answer without tools), which is not the task."""

    @property
    def system(self) -> str:
        first = self.messages[0]
        return first.text if first.role == "system" else ""
