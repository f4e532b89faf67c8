"""A model's tokenizer, with one promise: text that spells a control token can be made to stay text."""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dockyard.types import IntArray

type Json = dict[str, Any]


class Codec:
    """The tokenizer, twice: as it is, and without its control tokens for text that only looks like them."""

    def __init__(self, tokenizer: Json) -> None:
        self.control_ids = _control_ids(tokenizer)
        self._ids = frozenset(self.control_ids.values())
        self._full = Tokenizer.from_str(json.dumps(tokenizer))
        self._nonce = secrets.token_hex(8)  # nobody outside can spell a placeholder
        self._plain = Tokenizer.from_str(json.dumps(_without_control_tokens(tokenizer, self._nonce)))
        self._control = re.compile("|".join(map(re.escape, sorted(self.control_ids, key=len, reverse=True))) or "(?!)")
        self._hidden = re.compile(re.escape(self.placeholder("#")).replace(r"\#", "([0-9]+)"))
        self._normalises = any(token.get("normalized") for token in _added_tokens(tokenizer))

    def placeholder(self, name: str) -> str:
        """Text that stands for something else while the template runs."""
        return f"\ue000{self._nonce}:{name}\ue001"

    def shield(self, text: str) -> str:
        """Put placeholders where the text spells a control token."""
        normalizer = self._full.normalizer if self._normalises else None
        if normalizer is not None and self._control.search(normal := normalizer.normalize_str(text)):
            text = normal  # some tokenizers look for control tokens only after normalising
        return self._control.sub(lambda match: self.placeholder(str(self.control_ids[match[0]])), text)

    def encode(self, text: str) -> IntArray:
        """Ids of rendered text. Placeholders become the text they stand for, in ordinary tokens."""
        encoding = self._full.encode(text, add_special_tokens=False)
        if not self._hidden.search(text):
            return np.array(encoding.ids, np.int32)
        ids: list[int] = []
        start = 0
        for token_id, (left, right) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._ids:
                ids += [*self._encode_plain(text[start:left]), token_id]
                start = right
        return np.array([*ids, *self._encode_plain(text[start:])], np.int32)

    def encode_to_first_control(self, text: str) -> list[int]:
        """Ids up to and with the first control token; empty if there is none."""
        ids = self.encode(text).tolist()
        first = next((index for index, token_id in enumerate(ids) if token_id in self._ids), None)
        return [] if first is None else ids[: first + 1]

    def decode(self, ids: Sequence[int]) -> str:
        return self._full.decode(ids, skip_special_tokens=False)

    def _encode_plain(self, text: str) -> list[int]:
        spelled = {str(token_id): content for content, token_id in self.control_ids.items()}
        return self._plain.encode(self._hidden.sub(lambda match: spelled[match[1]], text), add_special_tokens=False).ids


def _without_control_tokens(tokenizer: Json, nonce: str) -> Json:
    """The same tokenizer, unable to produce a control token from any text."""
    model: Json = tokenizer["model"]
    control = set(_control_ids(tokenizer)) - {model.get("unk_token")}
    return tokenizer | {"added_tokens": [], "model": model | {"vocab": _renamed(model["vocab"], control, nonce)}}


def _control_ids(tokenizer: Json) -> dict[str, int]:
    return {token["content"]: token["id"] for token in _added_tokens(tokenizer)}


def _added_tokens(tokenizer: Json) -> list[Json]:
    return tokenizer.get("added_tokens") or []


def _renamed(vocab: dict[str, int] | list[list[Any]], control: set[str], nonce: str) -> object:
    """Control tokens listed as ordinary pieces get names that no text can spell; their ids stay taken."""

    def rename(piece: str) -> str:
        return f"\ufdd0{nonce}{piece}" if piece in control else piece

    if isinstance(vocab, dict):
        return {rename(piece): index for piece, index in vocab.items()}
    return [[rename(piece), score] for piece, score in vocab]
