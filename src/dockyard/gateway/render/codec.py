"""A model's tokenizer, which can encode text that spells a control token as plain text.

Some control tokens appear only where a template joins a text to its own, as in `<parameter=` + key + `>`. Shielding
each text alone does not catch those. A prompt with a fragment of a control token is therefore rendered a second time
without the fragment, and both renderings must contain the same control tokens.
"""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from dockyard.types import IntArray, Json, Message, Prompt, ToolCall

_LONGEST = 40
"""Longer control tokens are not searched for fragments."""


class Codec:
    """Holds the tokenizer twice: as it is, and without its control tokens, for text that only spells them."""

    def __init__(self, tokenizer: Json) -> None:
        self.control_ids = _control_ids(tokenizer)
        self._ids = frozenset(self.control_ids.values())
        self._full = Tokenizer.from_str(json.dumps(tokenizer))
        self._nonce = secrets.token_hex(8)  # so that no text can spell a placeholder
        self._plain = Tokenizer.from_str(json.dumps(_without_control_tokens(tokenizer, self._nonce)))
        self._control = re.compile("|".join(map(re.escape, sorted(self.control_ids, key=len, reverse=True))) or "(?!)")
        self._hidden = re.compile(re.escape(self.placeholder("#")).replace(r"\#", "([0-9]+)"))
        tokens = [token for token in self.control_ids if len(token) <= _LONGEST]
        self._middles = {t[i:j] for t in tokens for i in range(1, len(t) - 1) for j in range(i + 2, len(t))}
        self._begun = _any_of({t[:n] for t in tokens for n in range(2, len(t))}, "(?:{})$")
        self._ended = _any_of({t[-n:] for t in tokens for n in range(2, len(t))}, "{}")
        self._normalises = any(token.get("normalized") for token in _added_tokens(tokenizer))

    @property
    def vocab_size(self) -> int:
        return self._full.get_vocab_size()

    def placeholder(self, name: str) -> str:
        """Text that takes the place of something else while the template runs."""
        return f"\ue000{self._nonce}:{name}\ue001"

    def shield(self, text: str) -> str:
        """Replace each spelled control token by a placeholder."""
        normalizer = self._full.normalizer if self._normalises else None
        if normalizer is not None and self._control.search(normal := normalizer.normalize_str(text)):
            text = normal  # some tokenizers find control tokens only after normalising
        return self._control.sub(lambda match: self.placeholder(str(self.control_ids[match[0]])), text)

    def shield_all[T](self, value: T) -> T:
        """Shield every text inside a JSON value."""
        return _map_text(value, self.shield, self.shield)

    def encode(self, text: str) -> IntArray:
        """Encode rendered text. Placeholders become the text that they replace, in ordinary tokens."""
        if not self._hidden.search(text):
            # A batch of one, because that releases the GIL.
            return np.array(self._full.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)
        encoding = self._full.encode_batch([text], add_special_tokens=False)[0]
        ids: list[int] = []
        start = 0
        for token_id, (left, right) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._ids:
                ids += [*self._encode_plain(text[start:left]), token_id]
                start = right
        return np.array([*ids, *self._encode_plain(text[start:])], np.int32)

    def encode_after(self, before: str, text: str) -> IntArray:
        """Encode text that follows other text whose ids are fixed, so that no token may span both."""
        anchor = self.from_last_control(before)
        head, whole = self.encode(anchor), self.encode(anchor + text)
        return whole[len(head) :] if np.array_equal(whole[: len(head)], head) else self.encode(text)

    def is_fragment(self, text: str) -> bool:
        """Whether this text could become a control token together with the text before or after it."""
        return bool(self._begun.search(text[-_LONGEST:]) or self._ended.match(text[:_LONGEST]))

    def is_middle(self, name: str) -> bool:
        """Whether this name could become a control token between `<` and `>` or similar."""
        return name in self._middles

    def num_control(self, ids: IntArray) -> int:
        return int(np.isin(ids, list(self._ids)).sum())

    def to_first_control(self, text: str) -> str:
        """The text up to and including its first control token; empty if there is none."""
        first = self._control.search(text)
        return text[: first.end()] if first else ""

    def from_last_control(self, text: str) -> str:
        """The text from its last control token; all of it if there is none."""
        starts = [match.start() for match in self._control.finditer(text)]
        return text[starts[-1] :] if starts else text

    def token_id(self, token: str) -> int | None:
        """The id of the token with this text; None if there is none."""
        return self._full.token_to_id(token)

    def decode(self, ids: Sequence[int]) -> str:
        return self._full.decode(ids, skip_special_tokens=False)

    def _encode_plain(self, text: str) -> list[int]:
        spelled = {str(token_id): content for content, token_id in self.control_ids.items()}
        text = self._hidden.sub(lambda match: spelled[match[1]], text)
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _any_of(texts: set[str], form: str) -> re.Pattern[str]:
    return re.compile(form.format("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"))


def _without_control_tokens(tokenizer: Json, nonce: str) -> Json:
    """The same tokenizer, changed so that no text produces a control token."""
    model: Json = tokenizer["model"]
    control = set(_control_ids(tokenizer)) - {model.get("unk_token")}
    ordinary = [token for token in _added_tokens(tokenizer) if token["content"] not in _control_ids(tokenizer)]
    return tokenizer | {"added_tokens": ordinary, "model": model | {"vocab": _renamed(model["vocab"], control, nonce)}}


_ORDINARY = re.compile(r"[\s▁]*|</?(?!think>)[a-z]+[0-9]?>")
"""Added tokens that are plain text unless flagged special: runs of spaces, HTML tags (Gemma has them)."""


def _control_ids(tokenizer: Json) -> dict[str, int]:
    return {
        token["content"]: token["id"]
        for token in _added_tokens(tokenizer)
        if token.get("special") or not _ORDINARY.fullmatch(token["content"])
    }


def _added_tokens(tokenizer: Json) -> list[Json]:
    return tokenizer.get("added_tokens") or []


def _renamed(vocab: dict[str, int] | list[list[Any]], control: set[str], nonce: str) -> object:
    """Rename control tokens that the vocabulary lists, so that no text can spell them. Their ids stay in use."""

    def rename(piece: str) -> str:
        return f"\ufdd0{nonce}{piece}" if piece in control else piece

    if isinstance(vocab, dict):
        return {rename(piece): index for piece, index in vocab.items()}
    return [[rename(piece), score] for piece, score in vocab]


_SCHEMA_WORDS = frozenset("type function name description parameters properties required items enum default".split())
"""Keys that templates look up. The other keys of a tool are the harness's own."""


def without_fragments(prompt: Prompt, codec: Codec) -> Prompt | None:
    """The prompt with fragments of control tokens replaced by harmless words; None if it has no fragments."""
    replacer = _FragmentReplacer(codec)
    messages = tuple(replacer.message(message) for message in prompt.messages)
    tools = _map_text(prompt.tools, replacer.text, replacer.name)
    return replace(prompt, messages=messages, tools=tools) if replacer.num_changed else None


def _map_text(value: Any, change: Callable[[str], str], change_key: Callable[[str], str]) -> Any:
    """Change every text inside a JSON value, and the keys of its objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        items = cast("Json", value).items()
        return {change_key(key): _map_text(item, change, change_key) for key, item in items}
    if isinstance(value, list | tuple):
        inner = [_map_text(item, change, change_key) for item in cast("list[Any]", value)]
        return inner if isinstance(value, list) else tuple(inner)
    return value


class _FragmentReplacer:
    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.num_changed = 0

    def text(self, text: str) -> str:
        return self._harmless() if self._codec.is_fragment(text) else text

    def name(self, name: str) -> str:
        """Replace a name, which templates print between their own tags."""
        if name in _SCHEMA_WORDS:
            return name
        return self._harmless() if self._codec.is_middle(name) else self.text(name)

    def _harmless(self) -> str:
        self.num_changed += 1
        return f"x{self.num_changed}"

    def message(self, message: Message) -> Message:
        calls = tuple(
            ToolCall(call.id, self.name(call.name), _map_text(call.arguments, self.text, self.name))
            for call in message.calls
        )
        return replace(message, text=self.text(message.text), reasoning=self.text(message.reasoning), calls=calls)
