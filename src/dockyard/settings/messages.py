"""What is wrong with the settings, in words: the key, its place, its value, what was expected, and a hint."""

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from dockyard.config import Config
from dockyard.errors import UsageError
from dockyard.settings.text import settings_by_key, toml_value

LIST_HINT = "`dockyard train --help` lists every setting"

# By the first word of pydantic's error type, for errors about the type of a value.
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "dict": "a table",
    "list": "a list",
    "tuple": "a list",
    "path": "a path",
    "model": "a section",
}
_ABOUT_TYPE = ("_type", "_parsing", "_parsing_size", "_from_float")


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """One mistake in the settings."""

    message: str
    hint: str


class SettingsError(UsageError):
    """Everything that is wrong with the settings, at once."""

    def __init__(self, problems: Sequence[SettingProblem]) -> None:
        message = "\n".join(problem.message for problem in problems)
        super().__init__(message, hint="\n".join(problem.hint for problem in problems))
        self.problems = tuple(problems)


def raise_if_any(problems: Sequence[SettingProblem]) -> None:
    """Nothing is wrong, or everything that is wrong is said."""
    if problems:
        raise SettingsError(problems)


def explain(
    kind: type[Config], details: ErrorDetails, toml: Path | None, overridden: Collection[str]
) -> SettingProblem:
    """What pydantic found, in our words. Unknown keys come from the file: the command line's are caught before."""
    key = ".".join(map(str, details["loc"]))
    if details["type"] == "extra_forbidden":
        return unknown_setting(kind, key, spelled=f"`{key}` in `{toml}`", prefix="")
    if details["type"] in ("value_error", "assertion_error"):
        return SettingProblem(details["msg"].partition(", ")[2], LIST_HINT)
    if any(_overlap(key, given) for given in overridden):
        spelled = f"`--{key}` on the command line"
    else:
        spelled = f"`{key}` in `{toml}`"
    field = settings_by_key(kind).get(key)
    hint = f"`{key}`: {field.description}" if field and field.description else LIST_HINT
    return SettingProblem(f"{spelled} is {_shown(details['input'])}; it must be {_expected(details)}", hint)


def unknown_setting(kind: type[Config], key: str, *, spelled: str, prefix: str) -> SettingProblem:
    """A key that is no setting: name the nearest one, else list what there is."""
    known = settings_by_key(kind)
    sections = list(dict.fromkeys(_section(name) for name in known if "." in name))
    if key in sections:
        message = f"{spelled} is a section, not a setting"
        return SettingProblem(message, f"{_listed(_keys_of(known, key), prefix)}; {LIST_HINT}")
    message = f"{spelled} is not a setting"
    if near := suggest(key, [*known, *sections]):
        return SettingProblem(message, f"did you mean {' or '.join(f'`{prefix}{name}`' for name in near)}? {LIST_HINT}")
    if _section(key) in sections:
        return SettingProblem(message, f"{_listed(_keys_of(known, _section(key)), prefix)}; {LIST_HINT}")
    return SettingProblem(message, f"the sections are {', '.join(f'`{name}`' for name in sections)}; {LIST_HINT}")


def suggest(key: str, known: Iterable[str]) -> list[str]:
    """The known keys that a wrong one may have meant: the same name elsewhere, else a near one in the same section."""
    key = key.replace("-", "_")
    by_leaf: dict[str, list[str]] = {}
    for name in known:
        by_leaf.setdefault(_leaf(name), []).append(name)
    everywhere = [name for names in by_leaf.values() for name in names]
    near_leaves = difflib.get_close_matches(_leaf(key), by_leaf, 1, cutoff=0.7)
    return (
        by_leaf.get(_leaf(key), [])
        or difflib.get_close_matches(key, _keys_of(everywhere, _section(key)), 1, cutoff=0.7)
        or difflib.get_close_matches(key, everywhere, 1, cutoff=0.7)
        or [name for leaf in near_leaves for name in by_leaf[leaf]]
    )


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _keys_of(known: Iterable[str], section: str) -> list[str]:
    return [name for name in known if _section(name) == section]


def _listed(keys: Iterable[str], prefix: str) -> str:
    return f"choose from {', '.join(f'`{prefix}{key}`' for key in keys)}"


def _overlap(key: str, other: str) -> bool:
    """Whether one key is the other, or holds it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _expected(details: ErrorDetails) -> str:
    by_type = _EXPECTED.get(details["type"].partition("_")[0])
    if by_type and details["type"].endswith(_ABOUT_TYPE):
        return by_type
    if details["type"] == "too_short":
        return f"a list of at least {details.get('ctx', {})['min_length']}"
    if details["type"] == "string_too_short":
        return f"text with a length of at least {details.get('ctx', {})['min_length']}"
    return details["msg"].removeprefix("Input should be ")


def _shown(value: Any) -> str:
    if value == "":
        return "empty"
    text = value if isinstance(value, str) else "none" if value is None else toml_value(value)
    return f"`{text if len(text) <= 60 else f'{text[:57]}...'}`"
