"""Control tokens that only come about where a template puts a text between its own: `<parameter=` + key + `>`.

Shielding text by text does not see them. So what holds a fragment of a control token is rendered once more without
the fragment, and has to come to the same control tokens.
"""

from dataclasses import replace
from typing import Any, cast

from dockyard.gateway.history import Json, Message, Prompt, ToolCall
from dockyard.gateway.render.codec import Codec

_SCHEMA_WORDS = frozenset("type function name description parameters properties required items enum default".split())
"""Keys that templates look up; the rest of a tool's keys are the harness's own."""


def without_fragments(prompt: Prompt, codec: Codec) -> Prompt | None:
    """The prompt with harmless words where a text is part of a control token; None if there is none."""
    tame = _Tamer(codec)
    messages = tuple(tame.message(message) for message in prompt.messages)
    tools = tuple(cast("Json", tame.json(tool)) for tool in prompt.tools)
    return replace(prompt, messages=messages, tools=tools) if tame.num_changed else None


class _Tamer:
    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.num_changed = 0

    def text(self, text: str) -> str:
        return self._harmless() if self._codec.is_fragment(text) else text

    def name(self, name: str) -> str:
        """Templates put names between their own tags."""
        if name in _SCHEMA_WORDS:
            return name
        return self._harmless() if self._codec.is_middle(name) else self.text(name)

    def _harmless(self) -> str:
        self.num_changed += 1
        return f"x{self.num_changed}"

    def json(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            items = cast("Json", value).items()
            return {self.name(key): self.json(item) for key, item in items}
        if isinstance(value, list | tuple):
            return [self.json(item) for item in cast("list[Any]", value)]
        return value

    def message(self, message: Message) -> Message:
        calls = tuple(
            ToolCall(call.id, self.name(call.name), {self.name(k): self.json(v) for k, v in call.arguments.items()})
            for call in message.calls
        )
        return replace(message, text=self.text(message.text), reasoning=self.text(message.reasoning), calls=calls)
