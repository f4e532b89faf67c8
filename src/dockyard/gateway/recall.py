"""An endpoint's own turns, sent back to it word for word, whatever became of them in the agent's hands.

For an endpoint that knows a history by its messages and keeps the tokens of those it knows: an agent that trims a turn,
leaves its thoughts out or writes its arguments anew would begin another history there.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dockyard.gateway.forest import same_message, schema_defaults
from dockyard.gateway.history import ASSISTANT, Json, Message, Prompt
from dockyard.gateway.text_wire import chat_message, said_message


@dataclass(frozen=True, slots=True)
class _Said:
    told: list[Json]
    """What it answers."""
    wire: Json
    """In the endpoint's words."""
    message: Message
    """As the agent got it."""


class Recall:
    """What one session's endpoint said."""

    def __init__(self) -> None:
        self._said: list[_Said] = []
        self._ids: dict[str, str] = {}
        """The endpoint's for each call, by the ones that agents get."""

    def told(self, prompt: Prompt) -> list[Json]:
        """The prompt's messages, with every turn that the agent still has as the endpoint said it."""
        defaults = {tool["function"]["name"]: schema_defaults(tool) for tool in prompt.tools}
        told: list[Json] = []
        for message in prompt.messages:
            told.append(self._recalled(told, message, defaults) or chat_message(self._with_own_ids(message)))
        return told

    def heard(self, told: list[Json], wire: Json) -> Message:
        """An answer as the agent gets it: its calls have ids that no other turn's have, as agents take for granted."""
        message = said_message(wire)
        calls = tuple(replace(call, id=f"call_{secrets.token_hex(16)}") for call in message.calls)
        self._ids |= {ours.id: theirs.id for ours, theirs in zip(calls, message.calls, strict=True)}
        self._said.append(_Said(told, wire, replace(message, calls=calls)))
        return self._said[-1].message

    def _recalled(self, told: list[Json], message: Message, defaults: Mapping[str, Json]) -> Json | None:
        if message.role != ASSISTANT:
            return None
        said = (one for one in reversed(self._said) if same_message(one.message, message, defaults))
        return next((one.wire for one in said if one.told == told), None)

    def _with_own_ids(self, message: Message) -> Message:
        calls = tuple(replace(call, id=self._ids.get(call.id, call.id)) for call in message.calls)
        return replace(message, calls=calls, call_id=self._ids.get(message.call_id, message.call_id))
