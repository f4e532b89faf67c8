"""A model folder's Jinja chat template, and what the folder says about its tokens. No torch, no transformers.

Templates of thinking models drop the thoughts of earlier turns, but training keeps them in the history
(`docs/concepts/gateway.md`). `keeping_thoughts` makes a template that keeps them, for whoever serves the trained model.
It is accepted only if thoughts appear and histories without any render as before.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel

from dockyard.errors import DockyardError
from dockyard.gateway.render.codec import Codec
from dockyard.types import Json


class TemplateRejectionError(Exception):
    """The model's chat template does not accept these messages."""


class ChatTemplate:
    """A Jinja chat template with the names that model authors rely on."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json  # pyright: ignore[reportUnknownMemberType]
        environment.globals.update(  # pyright: ignore[reportUnknownMemberType]
            raise_exception=_raise_exception,
            strftime_now=datetime.now().strftime,  # one date for all prompts of a run
        )
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DockyardError(
                f"the chat template is not valid Jinja: {error}", hint="compare it with the model's published template"
            ) from error
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[Json], tools: Sequence[Json] = (), *, prompt: bool) -> str:
        """The text of a history; with `prompt`, also the words that hand over to the model."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=prompt,
                **self._special_tokens,
            )
        # Templates index and join what they are given.
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
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


class _NamedTemplate(BaseModel):
    name: str
    template: str


class TokenizerConfig(BaseModel, extra="allow"):
    """The part of `tokenizer_config.json` that matters here."""

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

    def all_ids(self) -> set[int]:
        own = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        nested = self.text_config.all_ids() if self.text_config else set[int]()
        return nested | {token_id for token_id in own if token_id is not None}


def read_config[T: BaseModel](file: Path, kind: type[T]) -> T:
    """A JSON file of the folder; one that is not there says nothing."""
    return kind.model_validate_json(file.read_bytes() if file.is_file() else b"{}")


def template_source(model_dir: Path, config: TokenizerConfig) -> str:
    """The chat template's text, wherever the folder keeps it."""
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


def eos_ids(model_dir: Path, config: TokenizerConfig, codec: Codec) -> frozenset[int]:
    """Every id that the folder says ends a turn."""
    named = codec.control_ids.get(config.special_tokens().get("eos_token", ""))
    files = [read_config(model_dir / name, _ModelConfig) for name in ("generation_config.json", "config.json")]
    found = files[0].all_ids() | files[1].all_ids()
    return frozenset(found if named is None else found | {named})


@dataclass(frozen=True, slots=True)
class _Change:
    old: str
    new: str
    """Replaces each `old`; without one, it goes in front."""

    def on(self, source: str) -> str:
        return source.replace(self.old, self.new) if self.old else self.new + source


_CHANGES = (
    _Change("loop.index0 > ns.last_query_index", "true"),  # Qwen3
    _Change("", "{%- set preserve_thinking = true %}"),  # Qwen3.6 and others that ask for it by name
    _Change("", "{%- set clear_thinking = false %}"),  # GLM
)
_THOUGHT = "first this, then that"
_USER: Json = {"role": "user", "content": "Go."}
_SAID: Json = {"role": "assistant", "content": "Done."}
_CALL: Json = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {"at": "a"}}}
_CALLED: Json = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: Json = {"role": "tool", "content": "one", "tool_call_id": "call_0", "name": "look"}
_TOOL: Json = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
_THOUGHTFUL: list[Json] = [_USER, {**_SAID, "reasoning_content": _THOUGHT}, _USER]
_THOUGHTLESS: tuple[list[Json], ...] = (
    [_USER],
    [{"role": "system", "content": "Be brief."}, _USER, _SAID, _USER],
    [_USER, _SAID],
    [_USER, _CALLED, _RESULT],
    [_USER, _CALLED, _RESULT, _SAID, _USER],
)


def keeping_thoughts(source: str, special_tokens: dict[str, str]) -> str | None:
    """The template's text, changed only if it must be; None if no change that is known makes it keep thoughts."""
    template = ChatTemplate(source, special_tokens)
    if _keeps(template):
        return source
    before = _prints(template)
    for change in _CHANGES:
        text = change.on(source)
        changed = ChatTemplate(text, special_tokens)
        if _keeps(changed) and _prints(changed) == before:
            return text
    return None


def _keeps(template: ChatTemplate) -> bool:
    return _THOUGHT in (_print(template, _THOUGHTFUL, tools=[]) or "")


def _prints(template: ChatTemplate) -> list[str | None]:
    return [_print(template, messages, tools=tools) for messages in _THOUGHTLESS for tools in ([], [_TOOL])]


def _print(template: ChatTemplate, messages: list[Json], *, tools: list[Json]) -> str | None:
    """None for what the template refuses."""
    try:
        return template.render(messages, tools, prompt=messages[-1]["role"] != "assistant")
    except TemplateRejectionError:
        return None
