"""Error messages about settings: the key, where it was set, its value, what was expected, and what to do."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

from dockyard.config import ADVANTAGE, ENGINE, FUNCTION, HTTP_URL, SOURCE, TASK_SOURCES, Config
from dockyard.errors import UsageError
from dockyard.settings.text import expected_text, settings_by_key, toml_value

# By the first word of pydantic's error type, for errors about the type of a value without a setting of its own.
_EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "dict": "a table",
    "list": "a list",
    "tuple": "a list",
    "path": "a path",
    "model": "a section",
}
_EXAMPLES = {"callbacks": '["module:Class"]'}
"""Settings whose syntax an error about their type shows."""
_ABOUT_TYPE = ("_type", "_parsing", "_parsing_size", "_from_float")
_ABOUT_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_PATTERNS = {
    HTTP_URL: "a URL that begins with http:// or https:// and holds no spaces and no credentials",
    ENGINE: "`transformers`, `vllm`, `sglang`, `openai`, or `module:Class`, your own class",
    FUNCTION: "`module:name`, your own function",
    SOURCE: f"{', '.join(f'`{name}`' for name in TASK_SOURCES)}, or `module:Class`, your own class",
    ADVANTAGE: "`std`, `mean`, `leave_one_out`, or `module:name`, your own function",
}


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """One mistake in the settings."""

    message: str
    hint: str


class SettingsError(UsageError):
    """All mistakes in the settings."""

    def __init__(self, problems: Sequence[SettingProblem]) -> None:
        message = "\n".join(problem.message for problem in problems)
        super().__init__(message, hint="\n".join(problem.hint for problem in problems))
        self.problems = tuple(problems)


def raise_if_any(problems: Sequence[SettingProblem]) -> None:
    """Raise one error that holds all problems, if there are any."""
    if problems:
        raise SettingsError(problems)


def list_hint(kind: type[Config]) -> str:
    """The end of a hint: how to find the right name."""
    return f"`{kind.help_command}` lists every setting"


def one_line(text: str | None) -> str:
    """A docstring that was wrapped in the source, as one line."""
    return " ".join((text or "").split())


def explain(kind: type[Config], details: ErrorDetails, spell: Callable[[str], str]) -> SettingProblem:
    """Explain an error of pydantic. `spell` says how the user wrote a key, and where."""
    key = ".".join(map(str, details["loc"]))
    if details["type"] == "extra_forbidden":
        return unknown_setting(kind, key, spelled=spell(key), prefix="")
    if details["type"] in ("value_error", "assertion_error"):
        return SettingProblem(details["msg"].partition(", ")[2], list_hint(kind))
    field = settings_by_key(kind).get(key)
    hint = f"`{key}`: {one_line(field.description)}" if field and field.description else list_hint(kind)
    is_of_field = details["type"].endswith(_ABOUT_TYPE) or details["type"] in _ABOUT_RANGE
    expected = expected_text(field) if field and is_of_field else _expected(details)
    if key in _EXAMPLES and details["type"].endswith("_type"):
        hint = f"write `{key} = {_EXAMPLES[key]}`, or `--{key} '{_EXAMPLES[key]}'` on the command line; {hint}"
    return SettingProblem(f"{spell(key)} is {_shown(details['input'])}; it must be {expected}", hint)


def unknown_setting(kind: type[Config], key: str, *, spelled: str, prefix: str) -> SettingProblem:
    """Name the nearest setting, else list those that exist."""
    known = settings_by_key(kind)
    sections = list(dict.fromkeys(_section(name) for name in known if "." in name))
    more = list_hint(kind)
    if key in sections:
        message = f"{spelled} is a section, not a setting"
        return SettingProblem(message, f"{_listed(_keys_of(known, key), prefix)}; {more}")
    message = f"{spelled} is not a setting"
    if near := suggest(key, [*known, *sections]):
        return SettingProblem(message, f"did you mean {' or '.join(f'`{prefix}{name}`' for name in near)}? {more}")
    if _section(key) in sections:
        return SettingProblem(message, f"{_listed(_keys_of(known, _section(key)), prefix)}; {more}")
    return SettingProblem(message, f"the sections are {', '.join(f'`{name}`' for name in sections)}; {more}")


def suggest(key: str, known: Iterable[str]) -> list[str]:
    """The known keys that a wrong key may stand for: the same name in another section, else a similar key."""
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


def _expected(details: ErrorDetails) -> str:
    by_type = _EXPECTED.get(details["type"].partition("_")[0])
    if by_type and details["type"].endswith(_ABOUT_TYPE):
        return by_type
    context = details.get("ctx", {})
    if details["type"] == "too_short":
        return f"a list of at least {context['min_length']}"
    if details["type"] == "string_too_short":
        return f"text with a length of at least {context['min_length']}"
    if details["type"] == "string_pattern_mismatch":
        return _PATTERNS.get(context["pattern"], f"text that matches `{context['pattern']}`")
    return details["msg"].removeprefix("Input should be ")


def _shown(value: Any) -> str:
    if value == "":
        return "empty"
    text = value if isinstance(value, str) else "none" if value is None else toml_value(value)
    return f"`{text if len(text) <= 60 else f'{text[:57]}...'}`"
