"""What the command line sets: `--trainer.lr 1e-4`, `--trainer.lr=1e-4`, `--agent.kwargs.foo 3`, or a short name.

Each word becomes a `Patch` once, by the type of its setting. Flags that stand for several settings are patches too, so
the loader validates all of them together with the file. Inside a table a value is a JSON or TOML literal, else plain
text; write `'"3"'` for the text 3.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from dockyard.config import Config
from dockyard.settings.messages import SettingProblem, list_hint, one_line, unknown_setting
from dockyard.settings.text import settings_by_key

NO_ALIASES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Patch:
    """Settings that one flag sets."""

    values: Mapping[str, object]
    """Dotted key -> value. A key may point into a table: `agent.kwargs.foo` adds to it, `agent.kwargs` replaces it."""
    flag: str
    """What the user wrote, e.g. `--trainer.lr` or `--epochs`. Error messages name it."""

    def spell(self, key: str) -> str:
        """How an error message names one of these settings."""
        if len(self.values) == 1:
            return f"`{self.flag}` on the command line"
        return f"`{key}`, set by `{self.flag}`,"


@dataclass(frozen=True, slots=True)
class Overrides:
    """Everything a command line sets, in order: the last value of a key wins."""

    patches: tuple[Patch, ...] = ()
    problems: tuple[SettingProblem, ...] = ()
    """What is wrong with the words. Reported together with what validation finds."""

    def before(self, *patches: Patch) -> "Overrides":
        """Add settings that override the file but not the words of the user."""
        return Overrides((*patches, *self.patches), self.problems)

    def after(self, *patches: Patch) -> "Overrides":
        """Add settings that override everything."""
        return Overrides((*self.patches, *patches), self.problems)

    def has_flag(self, flag: str) -> bool:
        """Whether the user wrote this flag."""
        return any(patch.flag == flag for patch in self.patches)

    def assignments(self) -> Iterator[tuple[str, Patch]]:
        """Each dotted key with the patch that sets it, in order."""
        for patch in self.patches:
            for key in patch.values:
                yield key, patch

    def apply_to(self, values: dict[str, Any]) -> None:
        """Write the settings over those of a file, in place."""
        for key, patch in self.assignments():
            _put(values, key.split("."), patch.values[key])


def read_overrides(
    kind: type[Config], given: Sequence[str] | Overrides, aliases: Mapping[str, str] = NO_ALIASES
) -> Overrides:
    """Parse words such as `--trainer.lr 1e-4`. `aliases` maps short names to keys: `--agent` -> `agent.name`."""
    if isinstance(given, Overrides):
        return given
    found = [_read(kind, pair, aliases) for pair in _pairs(kind, given)]
    return Overrides(
        tuple(item for item in found if isinstance(item, Patch)),
        tuple(item for item in found if isinstance(item, SettingProblem)),
    )


def forget(values: dict[str, Any], key: str) -> None:
    """Remove a setting from the values, in place, if it is there."""
    *sections, leaf = key.split(".")
    for section in sections:
        inner = values.get(section)
        if not isinstance(inner, dict):
            return
        values = cast(dict[str, Any], inner)
    values.pop(leaf, None)


def setting_of(known: Mapping[str, FieldInfo], key: str) -> str | None:
    """The setting that a dotted key names or points into; None if there is no such setting."""
    return next(
        (name for name in known if key == name or (key.startswith(f"{name}.") and _is_table(known[name]))), None
    )


type _Pair = tuple[str, str]


def _pairs(kind: type[Config], words: Sequence[str]) -> Iterator[_Pair | SettingProblem]:
    """Each flag with the text of its value."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        if not flag.removeprefix("--") or not flag.startswith("--"):
            yield SettingProblem(f"`{word}` is not an option", f"write `--section.key VALUE`; {list_hint(kind)}")
        elif equals:
            yield flag, text
        elif rest and not rest[0].startswith("--"):
            yield flag, rest.pop(0)
        else:
            yield SettingProblem(f"`{flag}` needs a value", f"write `{flag} VALUE` or `{flag}=VALUE`")


def _read(kind: type[Config], pair: _Pair | SettingProblem, aliases: Mapping[str, str]) -> Patch | SettingProblem:
    if isinstance(pair, SettingProblem):
        return pair
    flag, text = pair
    key = aliases.get(flag, flag.removeprefix("--"))
    known = settings_by_key(kind)
    setting = setting_of(known, key)
    if setting is None or "" in key.split("."):
        return unknown_setting(kind, key, spelled=f"`{flag}`", prefix="--")
    field = known[setting]
    value = _parse(field, text) if key == setting else _literal(text)
    if _is_table(field) and _holds_null(value):
        return SettingProblem(f"`{flag}` is `{text}`; a table cannot hold null", "leave that key out")
    if value == "" and Path in _members(field):
        return SettingProblem(f"`{flag}` is empty; it must be a path", f"`{key}`: {one_line(field.description)}")
    return Patch({key: value}, flag)


def _put(values: dict[str, Any], parts: Sequence[str], value: object) -> None:
    for part in parts[:-1]:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            return  # the file has a mistake here, which validation reports
        values = cast(dict[str, Any], inner)
    values[parts[-1]] = value


def _parse(field: FieldInfo, text: str) -> Any:
    """Pydantic converts the text, except for none, tables and lists."""
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
    """The members of a union, or the single type."""
    annotation = field.annotation
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_table(field: FieldInfo) -> bool:
    return any((get_origin(member) or member) is dict for member in _members(field))
