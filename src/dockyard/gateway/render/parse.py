"""What the policy sampled, as a message: thoughts, text, tool calls.

Only the agent's copy is made here; what is recorded stays the ids. A call that is no valid JSON is text to the agent.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, cast

from dockyard.gateway.calls import strict_object
from dockyard.gateway.history import ASSISTANT, Json, Message, ToolCall
from dockyard.gateway.render.codec import Codec
from dockyard.gateway.render.family import Family, PlainTokenizer
from dockyard.gateway.render.splice import CallFormat
from dockyard.types import IntArray

log = logging.getLogger(__name__)

type Parser = Callable[[IntArray, IntArray, Sequence[Json]], Any]
"""Sampled ids, prompt ids, tools -> the `ParsedResponse` of `renderers`."""


class ReplyParser:
    """Reads one model's replies."""

    def __init__(self, codec: Codec, parse: Parser | None, stop_ids: frozenset[int]) -> None:
        self._codec = codec
        self._parse = parse
        self._stop_ids = stop_ids

    @classmethod
    def of(
        cls, codec: Codec, family: Family | None, call_format: CallFormat, stop_ids: frozenset[int]
    ) -> "ReplyParser":
        return cls(codec, family.parse if family else _format_parser(codec, call_format, stop_ids), stop_ids)

    def message(self, sampled_ids: IntArray, prompt_ids: IntArray, tools: Sequence[Json]) -> Message:
        """The reply as its agent gets it. Nothing a policy can sample makes this fail."""
        ids = sampled_ids.tolist()
        text = self._codec.decode(ids[:-1] if ids and ids[-1] in self._stop_ids else ids)
        if self._parse is None:
            return _plain_text_calls(text) if tools else Message(ASSISTANT, text)
        try:
            parsed = self._parse(sampled_ids, prompt_ids, tools)
        except Exception as error:  # a parser that stumbles over a reply must not end the rollout
            log.warning("a reply could not be parsed and is passed on as text: %s: %s", type(error).__name__, error)
            return Message(ASSISTANT, text)
        return self._message(parsed, ids)

    def _message(self, parsed: Any, ids: list[int]) -> Message:
        calls: list[ToolCall] = []
        texts = [parsed.content]
        for attempt in parsed.tool_calls:
            call = _tool_call(attempt.name, attempt.arguments, attempt.id)
            if call:
                calls.append(call)
            else:
                span = attempt.token_span
                texts.append(self._codec.decode(ids[slice(*span)]) if span else attempt.raw)
        text = "\n".join(text for text in texts if text)
        return Message(ASSISTANT, text, parsed.reasoning_content or "", tuple(calls))


def _tool_call(name: object, arguments: object, native_id: str | None = None) -> ToolCall | None:
    """A call that an agent can be given; None if it is not a name with a JSON object."""
    values = strict_object(arguments)
    if not isinstance(name, str) or not name or values is None:
        return None
    name = name.encode(errors="replace").decode()
    return ToolCall(native_id or f"call_{secrets.token_hex(16)}", name, values)


_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def _plain_text_calls(text: str) -> Message:
    """Calls as the preamble asks for them. No token marks them, so the text does."""
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        fields = strict_object(match[1]) or {}
        call = _tool_call(fields.get("name"), fields.get("arguments", {}))
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    rest = _CALL.sub(take, text)
    return Message(ASSISTANT, rest.strip() if calls else text, calls=tuple(calls))


def _format_parser(codec: Codec, call_format: CallFormat, stop_ids: frozenset[int]) -> Parser | None:
    from renderers.configs import DefaultRendererConfig
    from renderers.default import DefaultRenderer
    from renderers.parsing import parse_llama_3, parse_qwen35

    tokenizer: Any = PlainTokenizer(codec, "", stop_ids)
    begin, end = codec.token_id("<tool_call>"), codec.token_id("</tool_call>")
    if call_format is CallFormat.LLAMA:
        return lambda sampled, prompt, tools: parse_llama_3(tokenizer, sampled.tolist(), stop_ids=set(stop_ids))
    if call_format is CallFormat.PREAMBLE or begin is None or end is None:
        return None
    if call_format is CallFormat.HERMES:
        generic = DefaultRenderer(tokenizer, DefaultRendererConfig(tool_parser="qwen3", reasoning_parser="think"))
        return lambda sampled, prompt, tools: generic.parse_response(
            _unstopped(sampled, stop_ids), prompt_ids=prompt.tolist()
        )
    think, think_end = codec.token_id("<think>"), codec.token_id("</think>")
    return lambda sampled, prompt, tools: parse_qwen35(
        tokenizer,
        sampled.tolist(),
        stop_ids=set(stop_ids),
        think_id=-1 if think is None else think,
        think_end_id=-1 if think_end is None else think_end,
        tool_call_id=begin,
        tool_call_end_id=end,
        tools=cast("Any", list(tools)),
    )


def _unstopped(sampled: IntArray, stop_ids: frozenset[int]) -> list[int]:
    ids = sampled.tolist()
    return ids[:-1] if ids and ids[-1] in stop_ids else ids
