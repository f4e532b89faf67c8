"""Renders histories to prompt ids and parses sampled ids, for the model in a folder. Needs no torch or transformers.

Text inside a message that spells a control token (`<|im_end|>`, `<think>`) stays text, so that the output of a tool
cannot end a turn or forge one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from dockyard.errors import DockyardError
from dockyard.gateway.render.codec import Codec, without_fragments
from dockyard.gateway.render.family import Family
from dockyard.gateway.render.parse import ReplyParser, ReplyWriter
from dockyard.gateway.render.splice import TemplateRenderer
from dockyard.gateway.render.template import (
    ChatTemplate,
    TemplateRejectionError,
    TokenizerConfig,
    eos_ids,
    read_config,
    template_source,
)
from dockyard.types import IntArray, Json, Message, Prompt, Rollout, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A readable summary of how a model's prompts are built."""

    renderer: str
    """`renderers:NAME`, or `template` for the generic splicer."""
    tool_calls: str
    splices: bool
    stop_tokens: tuple[str, ...]


class Renderer:
    """Converts histories to prompt ids and sampled ids to messages, with the template and tokenizer of one model."""

    def __init__(self, codec: Codec, template: TemplateRenderer, family: Family | None, eos: frozenset[int]) -> None:
        self._codec = codec
        self._template = template
        self._family = family
        family_ids = family.stop_ids if family else frozenset[int]()
        self.stop_ids = eos | frozenset(template.close_ids[-1:]) | family_ids
        self._replies = ReplyParser(codec, family, template.call_format, self.stop_ids)
        self._writer = ReplyWriter(codec, template, self.stop_ids)

    @classmethod
    def load(cls, model_dir: Path, name: str = "") -> Self:
        """Read `tokenizer.json`, the chat template and the end-of-turn ids of a model folder.

        `name` is the model's name on the Hub. It decides which family is tried first.
        """
        tokenizer_file = model_dir / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise DockyardError(
                f"`{model_dir}` has no `tokenizer.json`",
                hint="save it with `AutoTokenizer(...).save_pretrained(folder)`",
            )
        try:
            renderer = cls._read(model_dir, name)
        except DockyardError:
            raise
        except Exception as error:  # each library raises its own errors; the user can change only the folder
            raise DockyardError(
                f"the tokenizer in `{model_dir}` cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}",
                hint="save it again with `AutoTokenizer(...).save_pretrained(folder)`",
            ) from error
        if not renderer.stop_ids:
            raise DockyardError(
                f"`{model_dir}` names no end-of-turn token",
                hint="set `eos_token` in `tokenizer_config.json` or `eos_token_id` in `generation_config.json`",
            )
        return renderer

    @classmethod
    def _read(cls, model_dir: Path, name: str) -> Self:
        config = read_config(model_dir / "tokenizer_config.json", TokenizerConfig)
        codec = Codec(json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8")))
        template = TemplateRenderer(codec, ChatTemplate(template_source(model_dir, config), config.special_tokens()))
        eos = eos_ids(model_dir, config, codec)
        return cls(codec, template, Family.find(name, codec, template, eos), eos)

    @property
    def rendering(self) -> Rendering:
        return Rendering(
            renderer=f"renderers:{self._family.name}" if self._family else "template",
            tool_calls=self._family.name if self._family else self._template.call_format.value,
            splices=self._family is not None or self._template.splices,
            stop_tokens=tuple(sorted(map(self.token_text, self.stop_ids))),
        )

    def prompt(self, prompt: Prompt) -> IntArray:
        """The ids of a whole history, including the generation prompt."""
        ids = self._prompt(prompt)
        harmless = without_fragments(prompt, self._codec)
        if harmless is not None:
            self._compare(ids, self._prompt(harmless))
        return ids

    def _prompt(self, prompt: Prompt) -> IntArray:
        ids = self._family.prompt(prompt) if self._family else None
        return self._template.prompt(prompt) if ids is None else ids

    def _compare(self, ids: IntArray, harmless_ids: IntArray | None) -> None:
        if harmless_ids is None or self._codec.num_control(ids) != self._codec.num_control(harmless_ids):
            raise TemplateRejectionError("a name or a text in the history would become a control token of the model")

    def extend(
        self,
        prefix: tuple[IntArray, IntArray],
        calls: Sequence[ToolCall],
        new: Sequence[Message],
        tools: Sequence[Json],
    ) -> IntArray | None:
        """A prompt that keeps the ids of `prefix` (prompt and sampled ids) and appends `new`.

        `calls` are the tool calls of the sampled turn. None if `new` cannot be rendered on its own.
        """
        ids = self._extend(prefix, calls, new, tools)
        harmless = without_fragments(Prompt(tuple(new)), self._codec)
        if ids is not None and harmless is not None:
            self._compare(ids, self._extend(prefix, calls, harmless.messages, tools))
        return ids

    def _extend(
        self,
        prefix: tuple[IntArray, IntArray],
        calls: Sequence[ToolCall],
        new: Sequence[Message],
        tools: Sequence[Json],
    ) -> IntArray | None:
        before = np.concatenate(prefix)
        suffix = self._family.suffix(prefix, calls, new, tools) if self._family else None
        if suffix is not None:
            return np.concatenate([before, suffix])
        suffix = self._template.suffix(calls, new, tools)
        if suffix is None:
            return None
        return np.concatenate([before, self._template.close(before, self.stop_ids), suffix])

    def reply(self, message: Message, tools: Sequence[Json]) -> IntArray:
        """The ids that the model would have sampled for this message, with the token that ends the turn."""
        ids = self._writer.ids(message, tools)
        if ids is None:
            raise TemplateRejectionError("the chat template does not show how the model ends such a turn")
        harmless = without_fragments(Prompt((message,)), self._codec)
        if harmless is not None:
            self._compare(ids, self._writer.ids(harmless.messages[0], tools))
        return ids

    @property
    def keeps_thoughts(self) -> bool:
        """Whether the template prints the reasoning of a reply. If not, reasoning cannot be rendered."""
        return self._writer.keeps_thoughts

    def message(self, sampled_ids: IntArray, prompt_ids: IntArray, tools: Sequence[Json]) -> Message:
        """Parse a reply into reasoning, text and tool calls. Each call gets a new id."""
        return self._replies.message(sampled_ids, prompt_ids, tools)

    def transcript(self, rollout: Rollout) -> str:
        """The decoded segments of a rollout with their control tokens, one after the other."""
        return "\n\n".join(self.text(segment.token_ids) for segment in rollout.segments)

    @property
    def max_ids(self) -> int:
        """An upper bound of ids. Models often have a few more ids than their tokenizer, as padding."""
        return self._codec.vocab_size + 1024

    def text(self, ids: IntArray) -> str:
        """Decode ids, with their control tokens."""
        return self._codec.decode(ids.tolist())

    def token_text(self, token_id: int) -> str:
        return self._codec.decode([token_id])
