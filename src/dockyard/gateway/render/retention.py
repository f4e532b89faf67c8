"""A chat template that keeps the thoughts of earlier turns, as the policy saw them in training.

Templates of thinking models leave out what was thought before the last question. Here what was sampled stays in the
history (`docs/concepts/gateway.md`), so whoever serves the trained model needs a template that does the same. A change
is taken by proof: thoughts appear, and histories without any are rendered as they were.
"""

from dataclasses import dataclass

from dockyard.gateway.history import Json
from dockyard.gateway.render.template import ChatTemplate, TemplateRejectionError


@dataclass(frozen=True, slots=True)
class _Change:
    old: str
    new: str
    """Replaces each `old`; without one, it goes in front."""

    def on(self, source: str) -> str:
        return source.replace(self.old, self.new) if self.old else self.new + source


_CHANGES = (
    _Change("loop.index0 > ns.last_query_index", "true"),  # Qwen3
    _Change("", "{%- set preserve_thinking = true %}"),  # Qwen3.6 and others that ask for it by name
    _Change("", "{%- set clear_thinking = false %}"),  # GLM
)
_THOUGHT = "first this, then that"
_USER: Json = {"role": "user", "content": "Go."}
_SAID: Json = {"role": "assistant", "content": "Done."}
_CALL: Json = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {"at": "a"}}}
_CALLED: Json = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: Json = {"role": "tool", "content": "one", "tool_call_id": "call_0", "name": "look"}
_TOOL: Json = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
_THOUGHTFUL: list[Json] = [_USER, {**_SAID, "reasoning_content": _THOUGHT}, _USER]
_THOUGHTLESS: tuple[list[Json], ...] = (
    [_USER],
    [{"role": "system", "content": "Be brief."}, _USER, _SAID, _USER],
    [_USER, _SAID],
    [_USER, _CALLED, _RESULT],
    [_USER, _CALLED, _RESULT, _SAID, _USER],
)


def keeping_thoughts(source: str, special_tokens: dict[str, str]) -> str | None:
    """The template's text, changed only if it must be; None if no change that is known makes it keep thoughts."""
    template = ChatTemplate(source, special_tokens)
    if _keeps(template):
        return source
    before = _prints(template)
    for change in _CHANGES:
        text = change.on(source)
        changed = ChatTemplate(text, special_tokens)
        if _keeps(changed) and _prints(changed) == before:
            return text
    return None


def _keeps(template: ChatTemplate) -> bool:
    return _THOUGHT in (_print(template, _THOUGHTFUL, tools=[]) or "")


def _prints(template: ChatTemplate) -> list[str | None]:
    return [_print(template, messages, tools=tools) for messages in _THOUGHTLESS for tools in ([], [_TOOL])]


def _print(template: ChatTemplate, messages: list[Json], *, tools: list[Json]) -> str | None:
    """None for what the template refuses."""
    try:
        return template.render(messages, tools, prompt=messages[-1]["role"] != "assistant")
    except TemplateRejectionError:
        return None
