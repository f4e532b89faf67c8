"""The model families that the `renderers` package renders, behind an interface of ours.

A family is chosen by testing, not by name: it must render the probes below to the same ids as the model folder's own
template. The package is imported late, because it imports the OpenAI client.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from threading import Lock
from typing import Any, Self

import numpy as np

from dockyard.gateway.render.codec import Codec
from dockyard.gateway.render.splice import PROBE_CALL, PROBE_TOOL, TemplateRenderer, template_messages
from dockyard.gateway.render.template import TemplateRejectionError
from dockyard.types import ASSISTANT, IntArray, Json, Message, Prompt, ToolCall

log = logging.getLogger(__name__)

_PLAIN = {"default", "auto", "custom"}
"""Entries of the package's registry that are not model families."""
_NEARBY = 1024
"""Ids at the end of a prompt that always belong to its last messages."""


class PlainTokenizer:
    """The tokenizer interface that `renderers` expects."""

    def __init__(self, codec: Codec, name: str, eos_ids: frozenset[int]) -> None:
        self._codec = codec
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id = min(eos_ids, default=None)

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._codec.encode(text).tolist()

    def decode(self, token_ids: Sequence[int] | int, *_: Any, **__: Any) -> str:
        return self._codec.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self._codec.token_id(tokens)
        return [self._codec.token_id(token) for token in tokens]


class Family:
    """The renderer of one model family."""

    def __init__(self, name: str, codec: Codec, renderer: Any) -> None:
        self.name = name
        self._codec = codec
        self._renderer = renderer
        self._lock = Lock()  # the package's renderers are not thread-safe
        self.stop_ids: frozenset[int] = frozenset(renderer.get_stop_token_ids())

    @classmethod
    def find(cls, name: str, codec: Codec, template: TemplateRenderer, eos_ids: frozenset[int]) -> Self | None:
        """The family that renders as this template does; None if there is none."""
        tokenizer = PlainTokenizer(codec, name, eos_ids)
        for family_name, renderer in _candidates(tokenizer):
            family = cls(family_name, codec, renderer)
            if all(family._renders_like(template, probe) for probe in _PROBES):
                return family
        return None

    def prompt(self, prompt: Prompt) -> IntArray | None:
        """The ids of a whole history; None if a text spells a control token, which the package would not escape."""
        messages = template_messages(prompt.messages)
        if self._spells_control(messages) or self._spells_control(prompt.tools):
            return None
        ids = self._try(
            self._renderer.render_ids, messages, tools=list(prompt.tools) or None, add_generation_prompt=True
        )
        return None if ids is None else np.array(ids, np.int32)

    def suffix(
        self,
        prefix: tuple[IntArray, IntArray],
        calls: Sequence[ToolCall],
        new: Sequence[Message],
        tools: Sequence[Json],
    ) -> IntArray | None:
        """The ids that follow `prefix` (prompt and sampled ids), including the end of the turn if it is still open."""
        messages = template_messages([Message(ASSISTANT, "", calls=tuple(calls)), *new])[1:]
        if self._spells_control(messages):
            return None
        before, sampled = self._tail(prefix[0]), prefix[1].tolist()
        bridged = self._try(self._renderer.bridge_to_next_turn, before, sampled, messages, tools=list(tools) or None)
        if bridged is None or bridged.token_ids[: len(before) + len(sampled)] != before + sampled:
            return None
        return np.array(bridged.token_ids[len(before) + len(sampled) :], np.int32)

    def parse(self, sampled_ids: IntArray, prompt_ids: IntArray, tools: Sequence[Json]) -> Any:
        """Parse a reply into the package's `ParsedResponse`."""
        with self._lock:
            return self._renderer.parse_response(
                sampled_ids.tolist(), prompt_ids=self._tail(prompt_ids), tools=list(tools) or None
            )

    def _tail(self, prompt_ids: IntArray) -> list[int]:
        """The ids of a prompt's last messages. The package reads no further back, and long lists are slow."""
        earlier = prompt_ids[:-_NEARBY]
        last_ends = (np.flatnonzero(earlier == stop_id)[-1:] for stop_id in self.stop_ids)
        start = max((int(at) for ends in last_ends for at in ends), default=0)
        return prompt_ids[start:].tolist()

    def _renders_like(self, template: TemplateRenderer, probe: Prompt) -> bool:
        try:
            expected = template.prompt(probe)
        except TemplateRejectionError:
            return False
        ids = self.prompt(probe)
        return ids is not None and np.array_equal(ids, expected)

    def _try(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method; None if it raises, which a family that does not fit does in many ways."""
        with self._lock:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                log.debug("renderers' `%s` failed: %s: %s", self.name, type(error).__name__, error)
                return None

    def _spells_control(self, value: object) -> bool:
        """Whether a text inside this value would become a control token if it were encoded as it is."""
        return self._codec.shield_all(value) != value


def _candidates(tokenizer: PlainTokenizer) -> Iterator[tuple[str, Any]]:
    """The package's renderers for this tokenizer, starting with the one that it lists for the model."""
    from renderers.base import MODEL_RENDERER_MAP, create_renderer
    from renderers.configs import config_from_name

    named = MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
    others = sorted(set(MODEL_RENDERER_MAP.values()) - _PLAIN - {named})
    for name in [named, *others] if named else others:
        config = config_from_name(name)
        if config is None:
            continue
        try:
            yield name, create_renderer(tokenizer, _configured(type(config)))
        except Exception as error:  # most tokenizers lack most families' tokens
            log.debug("renderers' `%s` does not support this tokenizer: %s", name, error)


def _configured(kind: Any) -> Any:
    # Reasoning stays in the history, because the next turn is sampled after it.
    settings = {"thinking_retention": "all"}
    if "date_string" in kind.model_fields:
        settings["date_string"] = datetime.now().strftime("%d %b %Y")
    return kind(**settings)


_SYSTEM = Message("system", "You work in a shell.")
_CALLING = Message(ASSISTANT, "I look.", calls=(PROBE_CALL,))
_RESULT = Message("tool", "one\ntwo", call_id="call_0")
_PROBES = (
    Prompt((_SYSTEM, Message("user", "What is in a.txt?"))),
    Prompt((_SYSTEM, Message("user", "What is in a.txt?")), (PROBE_TOOL,)),
    Prompt((_SYSTEM, Message("user", "What is in a.txt?"), _CALLING, _RESULT), (PROBE_TOOL,)),
    Prompt(
        (_SYSTEM, Message("user", "Go."), _CALLING, _RESULT, Message(ASSISTANT, "Two."), Message("user", "And b?")),
        (PROBE_TOOL,),
    ),
)
