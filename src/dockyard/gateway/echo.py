"""Sends an endpoint its own earlier turns back word for word.

Some endpoints recognise a history by its messages. If an agent trims a turn or rewrites its arguments, such an endpoint
would start a new history.
"""

from dataclasses import dataclass, replace

from dockyard.chat_format import chat_message
from dockyard.gateway.endpoint_answer import new_call_id, reply_message
from dockyard.gateway.matching import ToolDefaults, same_message, tool_defaults
from dockyard.types import ASSISTANT, Json, Message, Prompt


@dataclass(frozen=True, slots=True)
class _EarlierTurn:
    sent: list[Json]
    """The messages that it answers."""
    wire: Json
    """The reply as the endpoint wrote it."""
    message: Message
    """The reply as the agent received it."""


class EndpointEcho:
    """The turns of one session as its endpoint wrote them."""

    def __init__(self) -> None:
        self._turns: list[_EarlierTurn] = []
        self._endpoint_ids: dict[str, str] = {}
        """Maps the call ids that the agent has to those of the endpoint."""

    def restore(self, prompt: Prompt) -> list[Json]:
        """Convert the prompt's messages, with each turn that the agent still has as the endpoint wrote it."""
        defaults = tool_defaults(prompt.tools)
        restored: list[Json] = []
        for message in prompt.messages:
            wire = self._find(restored, message, defaults)
            restored.append(chat_message(self._with_endpoint_ids(message)) if wire is None else wire)
        return restored

    def record(self, sent: list[Json], wire: Json) -> Message:
        """Remember an answer, and return it with new call ids: agents expect ids to be unique in a session."""
        message = reply_message(wire)
        calls = tuple(replace(call, id=new_call_id()) for call in message.calls)
        self._endpoint_ids |= {ours.id: theirs.id for ours, theirs in zip(calls, message.calls, strict=True)}
        turn = _EarlierTurn(sent, wire, replace(message, calls=calls))
        self._turns.append(turn)
        return turn.message

    def _find(self, restored: list[Json], message: Message, defaults: ToolDefaults) -> Json | None:
        if message.role != ASSISTANT:
            return None
        same = (turn for turn in reversed(self._turns) if same_message(turn.message, message, defaults))
        return next((turn.wire for turn in same if turn.sent == restored), None)

    def _with_endpoint_ids(self, message: Message) -> Message:
        ids = self._endpoint_ids
        calls = tuple(replace(call, id=ids.get(call.id, call.id)) for call in message.calls)
        return replace(message, calls=calls, call_id=ids.get(message.call_id, message.call_id))
