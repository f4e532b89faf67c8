"""A model folder's chat template and tokenizer: messages to ids, sampled ids to text. No torch, no transformers.

Text inside a message that spells a control token (`<|im_end|>`, `<think>`) stays text: a tool's output must not be
able to end a turn or to forge one.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self, cast

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel

from dockyard.errors import DockyardError
from dockyard.gateway.codec import Codec
from dockyard.gateway.forest import ASSISTANT, Message
from dockyard.types import IntArray, Rollout


class TemplateRejectionError(Exception):
    """The model's chat template does not accept these messages."""


class Renderer:
    """Turns histories into prompt ids and sampled ids into text, as one model's template and tokenizer say."""

    def __init__(self, codec: Codec, template: "ChatTemplate", eos_ids: frozenset[int]) -> None:
        self._codec = codec
        self._template = template
        self._turn = codec.placeholder("turn")
        self._turn_end = self._template_after([Message("user", "."), Message(ASSISTANT, self._turn)], prompt=False)
        self._close_ids = codec.encode_to_first_control(self._turn_end or "")
        self._default_system = self._find_default_system()
        self.stop_ids = eos_ids | frozenset(self._close_ids[-1:])

    @classmethod
    def load(cls, model_dir: Path) -> Self:
        """Read `tokenizer.json`, the chat template and the end-of-turn ids of a model folder."""
        tokenizer_file = model_dir / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise DockyardError(
                f"`{model_dir}` has no `tokenizer.json`",
                hint="save it with `AutoTokenizer(...).save_pretrained(folder)`",
            )
        try:
            config = _read(model_dir / "tokenizer_config.json", _TokenizerConfig)
            codec = Codec(json.loads(tokenizer_file.read_text(encoding="utf-8")))
            template = ChatTemplate(_template_source(model_dir, config), config.special_tokens())
            renderer = cls(codec, template, _eos_ids(model_dir, config, codec))
        except DockyardError:
            raise
        except Exception as error:  # each reader raises its own; the folder is what the user can change
            raise DockyardError(
                f"the tokenizer in `{model_dir}` cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}",
                hint="save it anew with `AutoTokenizer(...).save_pretrained(folder)`",
            ) from error
        if not renderer.stop_ids:
            raise DockyardError(
                f"`{model_dir}` names no end-of-turn token",
                hint="set `eos_token` in `tokenizer_config.json` or `eos_token_id` in `generation_config.json`",
            )
        return renderer

    def prompt(self, messages: Sequence[Message]) -> IntArray:
        """The ids of a whole history, up to where the model is to speak."""
        if self._default_system is not None and messages[0].role != "system":
            # Said here rather than by the template, which may leave it out when it renders the same history otherwise.
            messages = [Message("system", self._default_system), *messages]
        return self._codec.encode(self._template.render(self._shield(messages), prompt=True))

    def suffix(self, new: Sequence[Message]) -> IntArray | None:
        """The ids of messages that follow a closed turn, up to where the model is to speak; None if that is unsafe.

        Rendered behind a stand-in for the sampled turn. The cut is at the token that ends a turn, which no merge
        crosses, so the line break that templates print there and models never sample is part of the result.
        """
        history = [Message("user", "."), Message(ASSISTANT, self._turn), *self._shield(new)]
        text = self._template_after(history, prompt=True)
        if not self._close_ids or text is None or self._turn_end is None or not text.startswith(self._turn_end):
            return None
        return self._codec.encode(text)[len(self._close_ids) :]

    def close(self, prefix: IntArray) -> IntArray:
        """The ids that end the turn `prefix` stops in: none if it is closed, else what the template would print."""
        if len(prefix) and int(prefix[-1]) in self._close_ids[-1:]:
            return np.empty(0, np.int32)
        return np.array([*self._open_thought(prefix), *self._close_ids], np.int32)

    def text(self, sampled_ids: IntArray) -> str:
        """What the policy said, without the stop token."""
        ids = sampled_ids.tolist()
        return self._codec.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def transcript(self, rollout: Rollout) -> str:
        """A rollout as the model saw it, control tokens and all; its segments one after the other."""
        return "\n\n".join(self._codec.decode(segment.token_ids.tolist()) for segment in rollout.segments)

    def token_text(self, token_id: int) -> str:
        return self._codec.decode([token_id])

    def _shield(self, messages: Sequence[Message]) -> list[Message]:
        return [Message(message.role, self._codec.shield(message.text)) for message in messages]

    def _template_after(self, messages: Sequence[Message], *, prompt: bool) -> str | None:
        """What the template prints after the stand-in turn; None if it refuses or does not print that turn once."""
        try:
            parts = self._template.render(messages, prompt=prompt).split(self._turn)
        except TemplateRejectionError:
            return None
        return parts[1] if len(parts) == 2 else None

    def _open_thought(self, prefix: IntArray) -> list[int]:
        """`</think>` if the unfinished turn stops inside a thought."""
        begin, end = self._codec.control_ids.get("<think>"), self._codec.control_ids.get("</think>")
        if begin is None or end is None:
            return []
        marks = prefix[np.isin(prefix, [begin, end, *self.stop_ids])]
        return [end] if len(marks) and int(marks[-1]) == begin else []

    def _find_default_system(self) -> str | None:
        """The system text the template makes up when it is given none."""
        system, user = Message("system", self._turn), Message("user", self._codec.placeholder("user"))
        try:
            head, _, tail = self._template.render([system, user], prompt=True).partition(self._turn)
            bare = self._template.render([user], prompt=True)
        except TemplateRejectionError:
            return None
        default = bare[len(head) : len(bare) - len(tail)]
        added_only = head + default + tail == bare and user.text not in default
        return default if default and added_only and self._codec.shield(default) == default else None


class ChatTemplate:
    """A Jinja chat template with the names that model authors rely on."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json  # pyright: ignore[reportUnknownMemberType]
        environment.globals.update(  # pyright: ignore[reportUnknownMemberType]
            raise_exception=_raise_exception, strftime_now=_strftime_now
        )
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DockyardError(
                f"the chat template is not valid Jinja: {error}", hint="compare it with the model's published template"
            ) from error
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        """The text of a history; with `prompt`, also the words that hand over to the model."""
        history = [{"role": message.role, "content": message.text} for message in messages]
        try:
            return self._template.render(
                messages=history, tools=None, documents=None, add_generation_prompt=prompt, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:  # templates index and join what they are given
            raise TemplateRejectionError(f"the chat template refuses these messages: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for trainers that need telling. It prints its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    # Not Jinja's own, which escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _NamedTemplate(BaseModel):
    name: str
    template: str


class _TokenizerConfig(BaseModel, extra="allow"):
    chat_template: str | list[_NamedTemplate] | None = None

    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and the like, which templates print by name."""
        spelled = {
            name: _spelling(value) for name, value in (self.model_extra or {}).items() if name.endswith("_token")
        }
        return {name: text for name, text in spelled.items() if text is not None}


def _spelling(token: object) -> str | None:
    """A token is named by its text, or by an object that has the text and flags."""
    text = cast("dict[str, object]", token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


class _ModelConfig(BaseModel):
    """The part of `config.json` and `generation_config.json` that says which ids end a turn."""

    eos_token_id: int | list[int] | None = None
    text_config: "_ModelConfig | None" = None

    def eos_ids(self) -> set[int]:
        own = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        nested = self.text_config.eos_ids() if self.text_config else set[int]()
        return nested | {token_id for token_id in own if token_id is not None}


def _read[T: BaseModel](file: Path, kind: type[T]) -> T:
    return kind.model_validate_json(file.read_bytes() if file.is_file() else b"{}")


def _template_source(model_dir: Path, config: _TokenizerConfig) -> str:
    file = model_dir / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.chat_template
    if isinstance(source, list):  # several named templates, as older folders have them
        source = next((entry.template for entry in source if entry.name == "default"), None)
    if not source:
        raise DockyardError(
            f"`{model_dir}` has no chat template",
            hint="use an instruct model, or put a `chat_template.jinja` into the folder",
        )
    return source


def _eos_ids(model_dir: Path, config: _TokenizerConfig, codec: Codec) -> frozenset[int]:
    named = codec.control_ids.get(config.special_tokens().get("eos_token", ""))
    files = [_read(model_dir / name, _ModelConfig) for name in ("generation_config.json", "config.json")]
    found = files[0].eos_ids() | files[1].eos_ids()
    return frozenset(found if named is None else found | {named})
