"""Messages and recorded exchanges in the JSON form of OpenAI's Chat Completions.

Text-mode endpoints are sent messages in this form, and run folders and trace files store them in it.
"""

import json
from collections.abc import Mapping
from typing import Any

from dockyard.types import Exchange, Finish, Json, Message, Prompt, ToolCall

RAW = "__raw__"
"""The argument name under which tool arguments are kept that are not a JSON object."""


def chat_message(message: Message) -> Json:
    """Convert a message to its Chat Completions form."""
    wire: Json = {"role": message.role, "content": message.text}
    if message.role == "tool":
        wire["tool_call_id"] = message.call_id
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.calls:
        wire["content"] = message.text or None
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json()}}
            for call in message.calls
        ]
    return wire


def parse_message(wire: Mapping[str, Any]) -> Message:
    """Convert a message from its Chat Completions form.

    Raises KeyError, TypeError or AttributeError if the form is not known.
    """
    return Message(
        role=wire["role"],
        text=_parse_content(wire.get("content")),
        reasoning=replace_surrogates(wire.get("reasoning_content") or ""),
        calls=tuple(_parse_call(call) for call in wire.get("tool_calls") or ()),
        call_id=wire.get("tool_call_id") or "",
    )


def exchange_json(exchange: Exchange) -> Json:
    """Convert a recorded call to the form that run folders store."""
    return {
        "messages": [chat_message(message) for message in exchange.prompt.messages],
        "tools": list(exchange.prompt.tools),
        "reply": chat_message(exchange.reply),
        "finish": exchange.finish.value,
        "usage": {"prompt_tokens": exchange.num_prompt, "completion_tokens": exchange.num_sampled},
        "delivered": exchange.delivered,
        "auxiliary": exchange.prompt.auxiliary,
    }


def parse_exchange(wire: Mapping[str, Any]) -> Exchange:
    """Convert a recorded call from the form that `exchange_json` writes. Only `messages` and `reply` are required.

    Raises ValueError if the form is not known.
    """
    try:
        usage: Json = wire.get("usage") or {}
        return Exchange(
            prompt=Prompt(
                messages=tuple(parse_message(message) for message in wire["messages"]),
                tools=tuple(wire.get("tools") or ()),
                auxiliary=bool(wire.get("auxiliary")),
            ),
            reply=parse_message(wire["reply"]),
            finish=Finish.LENGTH if wire.get("finish") == Finish.LENGTH else Finish.STOP,
            num_prompt=usage.get("prompt_tokens", 0),
            num_sampled=usage.get("completion_tokens", 0),
            delivered=bool(wire.get("delivered", True)),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a recorded model call: {type(error).__name__}: {error}") from error


def parse_arguments(text: str) -> Json:
    """Parse tool arguments, a JSON object in a string. Anything else is kept as text under `RAW`."""
    return {RAW: text} if (value := strict_object(text or "{}")) is None else value


def strict_object(value: object) -> Json | None:
    """Convert JSON text or a Python value to an object that every JSON reader accepts; None for anything else."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
        # NaN is not JSON, and half a surrogate pair cannot be encoded.
        clean = json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace")
    except (ValueError, TypeError, RecursionError):
        return None
    return json.loads(clean) if isinstance(value, dict) else None


def replace_surrogates(text: str) -> str:
    """Replace each half of a surrogate pair, which no UTF-8 file can hold, by a question mark."""
    return text.encode(errors="replace").decode()


def _parse_content(content: str | list[Mapping[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return replace_surrogates(content or "")
    parts = (part.get("text") or "" if part["type"] == "text" else f"[{part['type']}]" for part in content)
    return replace_surrogates("\n".join(parts))


def _parse_call(wire: Mapping[str, Any]) -> ToolCall:
    function: Json = wire["function"]
    arguments: Json | str | None = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return ToolCall(wire.get("id") or "", function["name"], parse_arguments(text))
