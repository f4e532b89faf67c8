"""The Jinja chat template and the special tokens of a model folder. Needs no torch or transformers.

Templates of reasoning models drop the reasoning of earlier turns, but training keeps it in the history
(`docs/concepts/gateway.md`). `keeping_thoughts` changes a template to keep it, for serving the trained model. The
change is accepted only if reasoning is printed and histories without reasoning are rendered as before.
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
    """A Jinja chat template with the globals and filters that model authors expect."""

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
        """Render a history to text. With `prompt`, the generation prompt is appended."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=prompt,
                **self._special_tokens,
            )
        # Templates index and join their input.
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
            raise TemplateRejectionError(f"the chat template does not accept these messages: {error}") from error


class _GenerationTag(Extension):
    """Prints the body of `{% generation %}`, which marks what the model wrote for some trainers."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _NamedTemplate(BaseModel):
    name: str
    template: str


class TokenizerConfig(BaseModel, extra="allow"):
    """The part of `tokenizer_config.json` that is needed here."""

    chat_template: str | list[_NamedTemplate] | None = None

    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and so on, which templates refer to by name."""
        spelled = {
            name: _spelling(value) for name, value in (self.model_extra or {}).items() if name.endswith("_token")
        }
        return {name: text for name, text in spelled.items() if text is not None}


def _spelling(token: object) -> str | None:
    """The text of a token, which is a string or an object with the text and flags."""
    text = cast("dict[str, object]", token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


class _ModelConfig(BaseModel):
    """The part of `config.json` and `generation_config.json` that lists the ids that end a turn."""

    eos_token_id: int | list[int] | None = None
    text_config: "_ModelConfig | None" = None

    def all_ids(self) -> set[int]:
        own = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        nested = self.text_config.all_ids() if self.text_config else set[int]()
        return nested | {token_id for token_id in own if token_id is not None}


def read_config[T: BaseModel](file: Path, kind: type[T]) -> T:
    """Read a JSON file of the folder. A missing file counts as empty."""
    return kind.model_validate_json(file.read_bytes() if file.is_file() else b"{}")


def template_source(model_dir: Path, config: TokenizerConfig) -> str:
    """The source of the chat template, from its own file or from `tokenizer_config.json`."""
    file = model_dir / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.chat_template
    if isinstance(source, list):  # several named templates, as in older folders
        source = next((entry.template for entry in source if entry.name == "default"), None)
    if not source:
        raise DockyardError(
            f"`{model_dir}` has no chat template",
            hint="use an instruct model, or add a `chat_template.jinja` to the folder",
        )
    return source


def eos_ids(model_dir: Path, config: TokenizerConfig, codec: Codec) -> frozenset[int]:
    """All ids that end a turn according to the folder."""
    named = codec.control_ids.get(config.special_tokens().get("eos_token", ""))
    files = [read_config(model_dir / name, _ModelConfig) for name in ("generation_config.json", "config.json")]
    found = files[0].all_ids() | files[1].all_ids()
    return frozenset(found if named is None else found | {named})


@dataclass(frozen=True, slots=True)
class _Change:
    old: str
    new: str
    """Replaces each occurrence of `old`. If `old` is empty, it is prepended."""

    def on(self, source: str) -> str:
        return source.replace(self.old, self.new) if self.old else self.new + source


_CHANGES = (
    _Change("loop.index0 > ns.last_query_index", "true"),  # Qwen3
    _Change("", "{%- set preserve_thinking = true %}"),  # Qwen3.6 and others with this variable
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
    """The template's source, changed only if necessary; None if no known change makes it keep reasoning."""
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
    """The rendered text; None if the template does not accept the messages."""
    try:
        return template.render(messages, tools, prompt=messages[-1]["role"] != "assistant")
    except TemplateRejectionError:
        return None
