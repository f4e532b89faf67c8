"""Parses sampled ids into a message (reasoning, text, tool calls), and encodes a message as the model would sample it.

The parsed message is only what the agent receives; the record keeps the ids. A call that is not valid JSON stays text.

A template prints text that a model never samples (the line break after a turn, empty reasoning before it) and may leave
out text that it did sample. The encoding is what the template prints between its generation prompt and the token that
ends the turn.
"""

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from dockyard.chat_format import replace_surrogates, strict_object
from dockyard.gateway.render.codec import Codec
from dockyard.gateway.render.family import Family, PlainTokenizer
from dockyard.gateway.render.splice import CallFormat, TemplateRenderer, plain_messages
from dockyard.gateway.render.template import TemplateRejectionError
from dockyard.types import ASSISTANT, IntArray, Json, Message, ToolCall

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false


log = logging.getLogger(__name__)

type Parser = Callable[[IntArray, IntArray, Sequence[Json]], Any]
"""Sampled ids, prompt ids, tools -> the `ParsedResponse` of `renderers`."""


class ReplyParser:
    """Parses the replies of one model."""

    def __init__(self, codec: Codec, family: Family | None, call_format: CallFormat, stop_ids: frozenset[int]) -> None:
        self._codec = codec
        self._parse = family.parse if family else _format_parser(codec, call_format, stop_ids)
        self._stop_ids = stop_ids

    def message(self, sampled_ids: IntArray, prompt_ids: IntArray, tools: Sequence[Json]) -> Message:
        """Parse a reply for the agent. This never raises, whatever the policy sampled."""
        ids = sampled_ids.tolist()
        text = self._codec.decode(_unstopped(ids, self._stop_ids))
        if self._parse is None:
            return _plain_text_calls(text) if tools else Message(ASSISTANT, text)
        try:
            parsed = self._parse(sampled_ids, prompt_ids, tools)
        except Exception as error:  # a parser error must not end the rollout
            log.warning("a reply could not be parsed and is sent as text: %s: %s", type(error).__name__, error)
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
    """A call for the agent; None if it is not a name with a JSON object."""
    values = strict_object(arguments)
    if not isinstance(name, str) or not name or values is None:
        return None
    return ToolCall(native_id or f"call_{secrets.token_hex(16)}", replace_surrogates(name), values)


_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def _plain_text_calls(text: str) -> Message:
    """Parse calls in the form that the preamble describes. They are marked by text, not by tokens."""
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
            _unstopped(sampled.tolist(), stop_ids), prompt_ids=prompt.tolist()
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


def _unstopped(ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] in stop_ids else ids


_USER = Message("user", ".")
_BEGIN, _END = "<think>", "</think>"
_OPEN_THOUGHT = re.compile(rf"{_BEGIN}\s*\Z")


class ReplyWriter:
    """Encodes replies of one model."""

    def __init__(self, codec: Codec, template: TemplateRenderer, stop_ids: frozenset[int]) -> None:
        self._codec = codec
        self._template = template
        stops = [text for stop_id in stop_ids if (text := codec.decode([stop_id]))]
        self._stop = re.compile("|".join(map(re.escape, stops)) or "(?!)")
        self._turn = codec.placeholder("reply")
        self._thinks = _BEGIN in codec.control_ids and _END in codec.control_ids
        self._opening, self._ending = self._find_frame()
        self.keeps_thoughts = self._find_thoughts()

    def ids(self, message: Message, tools: Sequence[Json]) -> IntArray | None:
        """The ids with the token that ends the turn; None if they cannot be derived from the template."""
        if self._template.call_format is CallFormat.PREAMBLE:
            [message], tools = plain_messages([message]), ()
        message, shown = self._thought_apart(message), self._template.shown_tools(tools)
        before = self._template.text([_USER], shown, prompt=True)
        said = self._said(before, self._template.text([_USER, message], shown, prompt=False), message)
        text = None if said is None else self._closed(said)
        return None if text is None else self._codec.encode_after(before, text)

    def _said(self, before: str, whole: str, message: Message) -> str | None:
        """The part after the generation prompt; None if it cannot be separated."""
        if whole.startswith(before):
            said = whole[len(before) :]
            return said if message.reasoning else said.removeprefix(self._opening)
        opened = _OPEN_THOUGHT.search(before)
        if opened is None or not whole.startswith(before[: opened.start()]):
            return None
        said = whole[opened.start() :]
        if said.startswith(_BEGIN):
            return said.removeprefix(_BEGIN).lstrip()
        return f"{self._codec.shield(message.reasoning)}\n{_END}\n\n{said}"

    def _closed(self, said: str) -> str | None:
        """Up to the token that ends the turn."""
        if self._ending and said.endswith(self._ending):
            said = said[: len(said) - len(self._ending)]
        stops = list(self._stop.finditer(said))
        return said[: stops[-1].end()] if stops and not said[stops[-1].end() :].strip() else None

    def _thought_apart(self, message: Message) -> Message:
        """Move reasoning out of the text, because the model samples its tags as control tokens."""
        if not self._thinks or message.reasoning or _END not in message.text:
            return message
        thought, _, text = message.text.partition(_END)
        begin, found, thought = thought.rpartition(_BEGIN)
        if begin.strip() or (not found and _BEGIN in text):
            return message
        return replace(message, reasoning=thought.strip("\n"), text=text.lstrip("\n"))

    def _find_frame(self) -> tuple[str, str]:
        """What the template prints before the last turn only, and after the end of a turn."""
        turn = Message(ASSISTANT, self._turn)
        try:
            before = self._template.text([_USER], (), prompt=True)
            last = self._template.text([_USER, turn], (), prompt=False)
            inner = self._template.text([_USER, turn, _USER], (), prompt=False)
        except TemplateRejectionError:
            return "", ""
        head, _, tail = last.partition(self._turn)
        optional = inner.startswith(before + self._turn) and head.startswith(before)
        return head[len(before) :] if optional else "", tail.removeprefix(self._codec.to_first_control(tail))

    def _find_thoughts(self) -> bool:
        """Whether the template prints the reasoning of a turn."""
        message = Message(ASSISTANT, ".", self._turn)
        try:
            before = self._template.text([_USER], (), prompt=True)
            return bool(
                _OPEN_THOUGHT.search(before) or self._turn in self._template.text([_USER, message], (), prompt=False)
            )
        except TemplateRejectionError:
            return False
