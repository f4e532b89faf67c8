"""Control tokens that only come about where a template puts a text between its own: `<parameter=` + key + `>`.

Shielding text by text does not see them. So what holds a fragment of a control token is rendered once more without
the fragment, and has to come to the same control tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from dockyard.gateway.history import Json, Message, Prompt, ToolCall

type IsFragment = Callable[[str], bool]

_SCHEMA_WORDS = frozenset("type function name description parameters properties required items enum default".split())
"""Keys that templates look up; the rest of a tool's keys are the harness's own."""


def without_fragments(prompt: Prompt, is_fragment: IsFragment) -> Prompt | None:
    """The prompt with harmless words where a text is part of a control token; None if there is none."""
    tame = _Tamer(is_fragment)
    messages = tuple(tame.message(message) for message in prompt.messages)
    tools = tuple(cast("Json", tame.json(tool)) for tool in prompt.tools)
    return replace(prompt, messages=messages, tools=tools) if tame.num_changed else None


class _Tamer:
    def __init__(self, is_fragment: IsFragment) -> None:
        self._is_fragment = is_fragment
        self.num_changed = 0

    def text(self, text: str) -> str:
        if not self._is_fragment(text):
            return text
        self.num_changed += 1
        return f"x{self.num_changed}"

    def json(self, value: Any) -> Any:
        if isinstance(value, str):
            return value if value in _SCHEMA_WORDS else self.text(value)
        if isinstance(value, dict):
            items = cast("Json", value).items()
            return {key if key in _SCHEMA_WORDS else self.text(key): self.json(item) for key, item in items}
        if isinstance(value, list | tuple):
            return [self.json(item) for item in cast("list[Any]", value)]
        return value

    def message(self, message: Message) -> Message:
        calls = tuple(
            ToolCall(call.id, self.text(call.name), {self.text(k): self.json(v) for k, v in call.arguments.items()})
            for call in message.calls
        )
        return replace(message, text=self.text(message.text), reasoning=self.text(message.reasoning), calls=calls)
