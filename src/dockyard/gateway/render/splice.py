"""Renders new messages alone with any Jinja chat template, to append them to a turn exactly as it was sampled.

New messages are rendered after a placeholder for the sampled turn, and the output is cut at the token that ends a turn.
No tokenizer merge crosses that token, and the line break that templates print after it is part of the result. Whether
a template allows this is tested when it is loaded.

For templates that do not support tools, the tools are described in the system text. Calls are JSON between
`<tool_call>` tags, the form that most open models were trained on; results are user messages between `<tool_response>`
tags. `docs/concepts/gateway.md` shows an example.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from dockyard.gateway.render.codec import Codec
from dockyard.gateway.render.template import ChatTemplate, TemplateRejectionError
from dockyard.types import ASSISTANT, IntArray, Json, Message, Prompt, ToolCall

_TOOLS = """# Tools

You may call these functions, described one per line:
<tools>
{tools}
</tools>

To call a function, write its name and arguments as JSON between tags, in this form:
<tool_call>
{{"name": "function-name", "arguments": {{"argument": "value"}}}}
</tool_call>
Its result is given to you between <tool_response> tags."""


def without_tools(prompt: Prompt) -> Prompt:
    """The same prompt without tools and tool calls, which become text."""
    messages = plain_messages(prompt.messages)
    if prompt.tools:
        listed = (json.dumps(tool["function"], ensure_ascii=False) for tool in prompt.tools)
        text = _TOOLS.format(tools="\n".join(listed))
        system = f"{prompt.system}\n\n{text}" if prompt.system else text
        messages = [Message("system", system), *messages[1 if messages[0].role == "system" else 0 :]]
    return replace(prompt, messages=tuple(messages), tools=())


def plain_messages(messages: Sequence[Message]) -> list[Message]:
    """Convert calls to text, and each run of tool results to one user message."""
    plain: list[Message] = []
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            results.append(f"<tool_response>\n{message.text}\n</tool_response>")
            continue
        plain += _answered(results)
        results = []
        plain.append(_spoken(message) if message.role == ASSISTANT else message)
    return plain + _answered(results)


def _answered(results: list[str]) -> list[Message]:
    return [Message("user", "\n".join(results))] if results else []


def _spoken(message: Message) -> Message:
    calls = ({"name": call.name, "arguments": call.arguments} for call in message.calls)
    texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    return Message(ASSISTANT, "\n".join([message.text, *texts] if message.text else texts), message.reasoning)


class CallFormat(StrEnum):
    """The format in which a template prints tool calls, and in which the policy therefore writes them."""

    HERMES = "hermes"
    """`<tool_call>{"name", "arguments"}</tool_call>`, as Qwen2.5 and Qwen3."""
    XML = "xml"
    """`<tool_call><function=name><parameter=key>value`, as Qwen3-Coder."""
    LLAMA = "llama"
    """Only `{"name", "parameters"}`, as Llama 3."""
    PREAMBLE = "preamble"
    """The template does not support tools. They are described in the system text."""


class _Calls(StrEnum):
    """Where the placeholder turn has its tool calls: some templates print no text with calls, some require calls."""

    NONE = "none"
    BESIDE = "beside"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class _PlaceholderTurn:
    calls: _Calls
    with_tools: bool
    """Slower: the tools are rendered each time and then cut away."""


PROBE_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
PROBE_CALL = ToolCall("call_0", "probe_tool", {"key": "value"})
_USER = Message("user", ".")


class TemplateRenderer:
    """A chat template with its tokenizer."""

    def __init__(self, codec: Codec, template: ChatTemplate) -> None:
        self._codec = codec
        self._template = template
        self._turn = codec.placeholder("turn")
        self._turn_end = codec.to_first_control(self._after([_USER, Message(ASSISTANT, self._turn)]) or "")
        self.close_ids: list[int] = codec.encode(self._turn_end).tolist()
        self.call_format = self._find_call_format()
        self._default_system = self._find_default_system()
        self._placeholder = self._find_placeholder()

    @property
    def splices(self) -> bool:
        """Whether messages can be rendered on their own."""
        return self._placeholder is not None

    def prompt(self, prompt: Prompt) -> IntArray:
        """The ids of a whole history, including the generation prompt."""
        if self.call_format is CallFormat.PREAMBLE:
            prompt = without_tools(prompt)
        return self._codec.encode(self.text(prompt.messages, prompt.tools, prompt=True))

    def text(self, messages: Sequence[Message], tools: Sequence[Json], *, prompt: bool) -> str:
        """What the template prints, with placeholders for text that only spells a control token."""
        if self._default_system is not None and messages[0].role != "system":
            # Added here, because the template may leave it out in another rendering of the same history.
            messages = (Message("system", self._default_system), *messages)
        return self._render(messages, tools, prompt=prompt)

    def shown_tools(self, tools: Sequence[Json]) -> Sequence[Json]:
        """The tools that must be passed to render a single turn correctly."""
        return tools if self._placeholder is None or self._placeholder.with_tools else ()

    def suffix(self, calls: Sequence[ToolCall], new: Sequence[Message], tools: Sequence[Json]) -> IntArray | None:
        """The ids of messages after a finished turn with these calls; None if they cannot be rendered alone."""
        if self._placeholder is None:
            return None
        text = self._suffix_text(self._placeholder, [_USER], calls, new, tools)
        if text is None and len(calls) > 1:  # some templates allow only one call per turn
            text = self._suffix_text(self._placeholder, [_USER], calls[:1], new, tools)
        return None if text is None else self._codec.encode(text)[len(self.close_ids) :]

    def close(self, prefix: IntArray, stop_ids: frozenset[int]) -> IntArray:
        """The ids that the template would print to end the turn that `prefix` stops in; empty if it has ended."""
        if len(prefix) and int(prefix[-1]) in self.close_ids[-1:]:
            return np.empty(0, np.int32)
        return np.array([*self._open_thought(prefix, stop_ids), *self.close_ids], np.int32)

    def _suffix_text(
        self,
        placeholder: _PlaceholderTurn,
        head: Sequence[Message],
        calls: Sequence[ToolCall],
        new: Sequence[Message],
        tools: Sequence[Json],
    ) -> str | None:
        """What the template prints from the end of the placeholder turn; None if that cannot be separated."""
        if self.call_format is CallFormat.PREAMBLE:
            calls, new, tools = (), plain_messages(new), ()
        turn = self._placeholder_turn(placeholder, calls)
        shown = tools if placeholder.with_tools else ()
        text = self._after([*head, turn, *new], shown, prompt=True)
        printed_calls = self._printed_calls([*head, turn], shown) if turn.calls else ""
        begin = None if printed_calls is None else printed_calls + self._turn_end
        if text is None or begin is None or not self._turn_end or not text.startswith(begin):
            return None
        return text.removeprefix(printed_calls or "")

    def _printed_calls(self, messages: Sequence[Message], tools: Sequence[Json]) -> str | None:
        """What the template prints for the calls of the placeholder turn after the placeholder itself."""
        text = self._after(messages, tools)
        return text[: text.rindex(self._turn_end)] if text and self._turn_end in text else None

    def _placeholder_turn(self, placeholder: _PlaceholderTurn, calls: Sequence[ToolCall]) -> Message:
        match placeholder.calls:
            case _Calls.BESIDE if calls:
                return Message(ASSISTANT, self._turn, calls=tuple(calls))
            case _Calls.NAMED if calls:
                named = ToolCall(calls[0].id, self._turn, calls[0].arguments)
                return Message(ASSISTANT, "", calls=(named, *calls[1:]))
            case _:
                return Message(ASSISTANT, self._turn)

    def _after(self, messages: Sequence[Message], tools: Sequence[Json] = (), *, prompt: bool = False) -> str | None:
        """What the template prints after the placeholder; None if it raises or does not print the placeholder once."""
        try:
            parts = self._render(messages, tools, prompt=prompt).split(self._turn)
        except TemplateRejectionError:
            return None
        return parts[1] if len(parts) == 2 else None

    def _render(self, messages: Sequence[Message], tools: Sequence[Json] = (), *, prompt: bool) -> str:
        """Render with all texts shielded, so that none of them becomes a control token."""
        shield = self._codec.shield_all
        return self._template.render(shield(template_messages(messages)), shield(tools), prompt=prompt)

    def _open_thought(self, prefix: IntArray, stop_ids: frozenset[int]) -> list[int]:
        """The id of `</think>` if the unfinished turn stops inside its reasoning."""
        begin, end = self._codec.control_ids.get("<think>"), self._codec.control_ids.get("</think>")
        if begin is None or end is None:
            return []
        marks = prefix[np.isin(prefix, [begin, end, *stop_ids])]
        return [end] if len(marks) and int(marks[-1]) == begin else []

    def _find_call_format(self) -> CallFormat:
        try:
            listing = self._render([_USER], [PROBE_TOOL], prompt=True)
            called = self._render([_USER, Message(ASSISTANT, "", calls=(PROBE_CALL,))], prompt=False)
        except TemplateRejectionError:
            return CallFormat.PREAMBLE
        if PROBE_CALL.name not in listing:
            return CallFormat.PREAMBLE
        if f"<function={PROBE_CALL.name}>" in called:
            return CallFormat.XML
        if "<tool_call>" in called and '"arguments"' in called:
            return CallFormat.HERMES
        return CallFormat.LLAMA if '"parameters"' in called else CallFormat.PREAMBLE

    def _find_placeholder(self) -> _PlaceholderTurn | None:
        """The cheapest placeholder turn after which new messages are rendered as in a real history."""
        news = [
            [Message("user", "go on")],
            [Message("tool", "result", call_id=PROBE_CALL.id)],
            [Message("tool", "result", call_id=PROBE_CALL.id), Message("user", "go on")],
        ]
        wanted = [self._in_a_real_history(new) for new in news]
        for placeholder in [_PlaceholderTurn(calls, with_tools) for with_tools in (False, True) for calls in _Calls]:
            found = [self._probe(placeholder, [_USER], new) for new in news]
            if found == wanted and found[0] is not None:
                return placeholder
        return None

    def _probe(self, placeholder: _PlaceholderTurn, head: Sequence[Message], new: Sequence[Message]) -> str | None:
        calls = (PROBE_CALL,) if new[0].role == "tool" else ()
        return self._suffix_text(placeholder, head, calls, new, [PROBE_TOOL])

    def _in_a_real_history(self, new: Sequence[Message]) -> str | None:
        head = [Message("system", "Be brief."), Message("user", "Probe it."), Message(ASSISTANT, "Fine."), _USER]
        places = (_Calls.BESIDE, _Calls.NAMED, _Calls.NONE)
        tries = (self._probe(_PlaceholderTurn(place, True), head, new) for place in places)
        return next((text for text in tries if text is not None), None)

    def _find_default_system(self) -> str | None:
        """The system text that the template adds if there is none."""
        system, user = Message("system", self._turn), Message("user", self._codec.placeholder("user"))
        try:
            with_system = self._render([system, user], prompt=True)
            bare = self._render([user], prompt=True)
        except TemplateRejectionError:
            return None
        head, _, tail = with_system.partition(self._turn)
        default = bare[len(head) : len(bare) - len(tail)]
        added_only = head + default + tail == bare and user.text not in default
        return default if default and added_only and self._codec.shield(default) == default else None


def template_messages(messages: Sequence[Message]) -> list[Json]:
    """Messages in the form that chat templates and the `renderers` package expect."""
    tool_names = {call.id: call.name for message in messages for call in message.calls}
    return [_template_message(message, tool_names) for message in messages]


def _template_message(message: Message, tool_names: dict[str, str]) -> Json:
    wire: Json = {"role": message.role, "content": message.text}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.calls:
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if message.role == "tool":
        wire["tool_call_id"] = message.call_id
        wire["name"] = tool_names.get(message.call_id, "tool")
    return wire
