"""Chat templates rendered by plain Jinja, written apart from the gateway's own code to compare it with."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols

from dockyard.types import Message

type Json = dict[str, Any]
type Plain = Callable[[Sequence[Message], Sequence[Json], bool], str]
"""Messages, tools, with the words that hand over to the model -> text."""


def plain_jinja(source: str, **named: Any) -> Plain:
    """The template as its author meant it; `named` are further names it uses, such as `bos_token`."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals.update(raise_exception=_refuse, strftime_now=datetime.now().strftime)
    template = environment.from_string(source)

    def render(messages: Sequence[Message], tools: Sequence[Json], prompt: bool) -> str:
        names = {call.id: call.name for message in messages for call in message.calls}
        history = [_plain_message(message, names) for message in messages]
        return template.render(messages=history, tools=list(tools) or None, add_generation_prompt=prompt, **named)

    return render


def _refuse(message: str) -> None:
    raise AssertionError(message)


def _plain_message(message: Message, names: dict[str, str]) -> Json:
    plain: Json = {"role": message.role, "content": message.text}
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.calls:
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
        plain["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    if message.role == "tool":
        plain |= {"tool_call_id": message.call_id, "name": names.get(message.call_id, "tool")}
    return plain
