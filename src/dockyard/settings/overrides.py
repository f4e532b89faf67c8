"""Settings that override those of a file: from the command line, or from the arguments of a Python function.

On the command line they are `--trainer.lr 1e-4`, `--trainer.lr=1e-4`, `--agent.kwargs.foo 3`, or a short name. Each
becomes a `Patch` once, by the type of its setting. Flags that stand for several settings are patches too, so the loader
validates all of them together with the file. Inside a table a value is a JSON or TOML literal, else plain text; write
`'"3"'` for the text 3. In Python they are values, nested by section or named by dotted keys.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin

import numpy as np
from pydantic.fields import FieldInfo

from dockyard.config import Config
from dockyard.settings.messages import SettingProblem, list_hint, one_line, unknown_setting
from dockyard.settings.text import expected_text, settings_by_key

NO_ALIASES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Patch:
    """Settings that one flag or one argument sets."""

    values: Mapping[str, object]
    """Dotted key -> value. A key may point into a table: `agent.kwargs.foo` adds to it, `agent.kwargs` replaces it."""
    flag: str
    """What the user wrote, e.g. `--trainer.lr`, `--epochs` or, in Python, `trainer.lr`. Error messages name it."""
    place: str = "on the command line"
    """Where the user wrote it, as error messages say it after the flag."""

    def spell(self, key: str) -> str:
        """How an error message names one of these settings."""
        if len(self.values) == 1:
            return f"`{self.flag}` {self.place}"
        return f"`{key}`, set by `{self.flag}`,"


@dataclass(frozen=True, slots=True)
class Overrides:
    """All settings that override a file, in order: the last value of a key wins."""

    patches: tuple[Patch, ...] = ()
    problems: tuple[SettingProblem, ...] = ()
    """Mistakes that were found while reading them. They are reported together with those that validation finds."""

    def before(self, *patches: Patch) -> "Overrides":
        """Add settings that override the file but not what the user wrote."""
        return Overrides((*patches, *self.patches), self.problems)

    def after(self, *patches: Patch) -> "Overrides":
        """Add settings that override everything."""
        return Overrides((*self.patches, *patches), self.problems)

    def sets(self, key: str) -> bool:
        """Whether the setting with this dotted key is among them."""
        return any(key == other for other, _ in self.assignments())

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
    return _gathered(_read(kind, pair, aliases) for pair in _pairs(kind, given))


def value_overrides(kind: type[Config], values: Mapping[str, object], place: str) -> Overrides:
    """Read Python values, nested by section or named by dotted keys: `{"steps": 3, "trainer": {"lr": 1e-4}}`.

    `place` says where they come from, e.g. "in the arguments of `train`".
    """
    known = settings_by_key(kind)
    return _gathered(_of_value(kind, key, value, place) for key, value in _leaves(values, known))


def _gathered(found: Iterable[Patch | SettingProblem]) -> Overrides:
    patches: list[Patch] = []
    problems: list[SettingProblem] = []
    for item in found:
        patches.append(item) if isinstance(item, Patch) else problems.append(item)
    return Overrides(tuple(patches), tuple(problems))


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
"""A flag and the text of its value."""
type _Leaf = tuple[str, object]
"""A dotted key and its value."""


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
    return _unusable(field, key, value, spelled=f"`{flag}`", shown=text) or Patch({key: value}, flag)


def _unusable(field: FieldInfo, key: str, value: object, *, spelled: str, shown: object) -> SettingProblem | None:
    """A mistake that validation would not find, or not explain."""
    if _is_table(field) and _holds_null(value):
        return SettingProblem(f"{spelled} is `{shown}`; a table cannot hold null", "leave that key out")
    if value == "" and Path in _members(field):
        return SettingProblem(f"{spelled} is empty; it must be a path", f"`{key}`: {one_line(field.description)}")
    return None


def _leaves(values: Mapping[str, object], known: Mapping[str, FieldInfo], path: str = "") -> Iterator[_Leaf]:
    """Each value with its dotted key. A dict that is the value of one setting is not split."""
    for name, value in values.items():
        key = f"{path}{name}"
        if isinstance(value, Config):
            value = cast(object, value.model_dump(exclude_unset=True))
        is_section = any(other.startswith(f"{key}.") for other in known)
        if isinstance(value, Mapping) and key not in known and (value or is_section):
            yield from _leaves(cast(Mapping[str, object], value), known, f"{key}.")
        else:
            yield key, value


def _of_value(kind: type[Config], key: str, value: object, place: str) -> Patch | SettingProblem:
    known = settings_by_key(kind)
    setting = setting_of(known, key)
    spelled = f"`{key}` {place}"
    if setting is None or "" in key.split("."):
        return unknown_setting(kind, key, spelled=spelled, prefix="")
    plain = _plain(value)
    field = known[setting]
    if key == setting and isinstance(plain, bool) and _is_number(field):  # validation would read True as 1
        message = f"{spelled} is `{plain}`; it must be {expected_text(field)}"
        return SettingProblem(message, f"`{key}`: {one_line(field.description)}")
    problem = _unusable(field, key, plain, spelled=spelled, shown=value)
    return problem or Patch({key: plain}, key, place)


def _plain(value: object) -> object:
    """The value as JSON or TOML has it: no numpy numbers, no paths, no values of other types."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in cast(Mapping[object, object], value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in cast(Iterable[object], value)]
    if isinstance(value, np.generic):
        return cast(object, value.item())  # pyright: ignore[reportUnknownMemberType]
    return value if value is None or isinstance(value, str | int | float) else str(value)


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


def _is_number(field: FieldInfo) -> bool:
    members = _members(field)
    return bool not in members and (int in members or float in members)


def _is_table(field: FieldInfo) -> bool:
    return any((get_origin(member) or member) is dict for member in _members(field))
