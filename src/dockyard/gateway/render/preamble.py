"""Tools for chat templates that know none: told in the system text, called and answered in plain text.

The calls are JSON between `<tool_call>` tags, the form most open models have seen; results come back in the user's
name between `<tool_response>` tags. `docs/concepts/gateway.md` shows the text.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from dockyard.gateway.history import ASSISTANT, Json, Message, Prompt, ToolCall

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
    """The same prompt in plain messages."""
    messages = plain_messages(prompt.messages)
    if prompt.tools:
        text = _TOOLS.format(tools="\n".join(map(_line, prompt.tools)))
        system = f"{prompt.system}\n\n{text}" if prompt.system else text
        messages = [Message("system", system), *messages[1 if messages[0].role == "system" else 0 :]]
    return replace(prompt, messages=tuple(messages), tools=())


def plain_messages(messages: Sequence[Message]) -> list[Message]:
    """Calls become text, and the results that follow each other become one message of the user."""
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
    calls = [f"<tool_call>\n{_call_json(call)}\n</tool_call>" for call in message.calls]
    return Message(ASSISTANT, "\n".join([message.text, *calls] if message.text else calls), message.reasoning)


def _call_json(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)


def _line(tool: Json) -> str:
    return json.dumps(tool["function"], ensure_ascii=False)
