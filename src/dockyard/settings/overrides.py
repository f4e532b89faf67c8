"""Settings from command-line words: `--trainer.lr 1e-4`, `--trainer.lr=1e-4`, `--agent.kwargs.foo 3`.

Inside a table a value is a JSON or TOML literal, else plain text; write `'"3"'` for the text 3.
"""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from dockyard.config import Config
from dockyard.settings.messages import LIST_HINT, SettingProblem, unknown_setting
from dockyard.settings.text import settings_by_key


@dataclass(frozen=True, slots=True)
class Applied:
    """The keys that were written into the values, and what was wrong with the others."""

    keys: frozenset[str]
    problems: tuple[SettingProblem, ...]


def apply_overrides(kind: type[Config], values: dict[str, Any], words: Sequence[str]) -> Applied:
    """Write what the command line says over what the file says, in place. The last of a repeated key wins."""
    known = settings_by_key(kind)
    keys: set[str] = set()
    problems: list[SettingProblem] = []
    for pair in _pairs(words):
        problem = pair if isinstance(pair, SettingProblem) else _apply(kind, known, values, *pair)
        if problem:
            problems.append(problem)
        elif isinstance(pair, tuple):
            keys.add(pair[0])
    return Applied(frozenset(keys), tuple(problems))


def forget(values: dict[str, Any], key: str) -> None:
    """Remove a setting from the values, in place, if it is there."""
    *sections, leaf = key.split(".")
    for section in sections:
        inner = values.get(section)
        if not isinstance(inner, dict):
            return
        values = cast(dict[str, Any], inner)
    values.pop(leaf, None)


def _pairs(words: Sequence[str]) -> list[tuple[str, str] | SettingProblem]:
    pairs: list[tuple[str, str] | SettingProblem] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            pairs.append(
                SettingProblem(f"`{word}` is not an option", f"settings are `--section.key value`; {LIST_HINT}")
            )
        elif equals:
            pairs.append((key, text))
        elif rest and not rest[0].startswith("--"):
            pairs.append((key, rest.pop(0)))
        else:
            pairs.append(SettingProblem(f"`--{key}` needs a value", f"write `--{key} VALUE` or `--{key}=VALUE`"))
    return pairs


def _apply(
    kind: type[Config], known: dict[str, FieldInfo], values: dict[str, Any], key: str, text: str
) -> SettingProblem | None:
    parts = key.split(".")
    setting = next(
        (name for name in known if key == name or (key.startswith(f"{name}.") and _is_table(known[name]))), ""
    )
    if not setting or "" in parts:
        return unknown_setting(kind, key, spelled=f"`--{key}`", prefix="--")
    field = known[setting]
    value = _parse(field, text) if key == setting else _literal(text)
    if _is_table(field) and _holds_null(value):
        return SettingProblem(f"`--{key}` is `{text}`; a table cannot hold null", "leave that key out")
    if value == "" and Path in _members(field):
        return SettingProblem(f"`--{key}` is empty; it must be a path", f"`{key}`: {field.description}")
    _put(values, parts, value)
    return None


def _put(values: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            return  # the file has a mistake here, which validation reports
        values = cast(dict[str, Any], inner)
    values[parts[-1]] = value


def _parse(field: FieldInfo, text: str) -> Any:
    """Text for pydantic to convert; only none, tables and lists need a reading of their own."""
    members = _members(field)
    if NoneType in members and text.lower() in ("none", "null"):
        return None
    if any((get_origin(member) or member) in (dict, list, tuple) for member in members):
        return _literal(text)
    return text


def _literal(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        pass
    if text[:1] not in ("{", "[", '"', "'"):
        return text  # TOML would read `2026-01-22` as a date
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _holds_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_null, cast(dict[str, Any], value).values()))
    if isinstance(value, list):
        return any(map(_holds_null, cast(list[Any], value)))
    return value is None


def _members(field: FieldInfo) -> tuple[Any, ...]:
    """The members of a union, or the one type there is."""
    annotation = field.annotation
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_table(field: FieldInfo) -> bool:
    return any((get_origin(member) or member) is dict for member in _members(field))
