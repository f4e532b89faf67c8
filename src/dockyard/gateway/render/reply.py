"""A finished message of the assistant as the ids that the model would have sampled to say it.

The template knows how a turn looks in a history, not how it came about: it prints what the model never samples (the
line break behind a turn, an empty thought in front of it) and may leave out what it did (thoughts of a model that is
handed over to inside of one). What the template prints after its own handing over, up to the token that ends a turn,
is what the model said.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from dockyard.gateway.history import ASSISTANT, Json, Message
from dockyard.gateway.render.codec import Codec
from dockyard.gateway.render.preamble import plain_messages
from dockyard.gateway.render.splice import CallFormat, TemplateRenderer
from dockyard.gateway.render.template import TemplateRejectionError
from dockyard.types import IntArray

_USER = Message("user", ".")
_BEGIN, _END = "<think>", "</think>"
_OPEN_THOUGHT = re.compile(rf"{_BEGIN}\s*\Z")


class ReplyWriter:
    """Writes one model's replies."""

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
        """With the token that ends the turn. None if the template does not show how the model would say it."""
        if self._template.call_format is CallFormat.PREAMBLE:
            [message], tools = plain_messages([message]), ()
        message, shown = self._thought_apart(message), self._template.shown_tools(tools)
        before = self._template.text([_USER], shown, prompt=True)
        said = self._said(before, self._template.text([_USER, message], shown, prompt=False), message)
        text = None if said is None else self._closed(said)
        return None if text is None else self._codec.encode_after(before, text)

    def _said(self, before: str, whole: str, message: Message) -> str | None:
        """What stands behind the handing over."""
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
        """A thought that somebody left in the text; the model samples its ends as the tokens they are."""
        if not self._thinks or message.reasoning or _END not in message.text:
            return message
        thought, _, text = message.text.partition(_END)
        begin, found, thought = thought.rpartition(_BEGIN)
        if begin.strip() or (not found and _BEGIN in text):
            return message
        return replace(message, reasoning=thought.strip("\n"), text=text.lstrip("\n"))

    def _find_frame(self) -> tuple[str, str]:
        """What the template puts before a last turn but not before others, and behind the end of one."""
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
        """Does a turn show what was thought before it?"""
        message = Message(ASSISTANT, ".", self._turn)
        try:
            before = self._template.text([_USER], (), prompt=True)
            return bool(
                _OPEN_THOUGHT.search(before) or self._turn in self._template.text([_USER, message], (), prompt=False)
            )
        except TemplateRejectionError:
            return False
