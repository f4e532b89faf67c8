"""Settings as text: the resolved run as TOML, and the list of every setting for `--help`.

TOML has no null, so a setting that is none is written as a comment, and its default must be none too.
"""

import json
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeAliasType, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from dockyard.config import Config, OnResume
from dockyard.errors import UsageError


def to_toml(config: Config) -> str:
    """The settings as TOML that loads back to the same settings. A comment marks values that are not the default."""
    return "\n".join(_lines(config, type(config)(), "")).lstrip("\n") + "\n"


def toml_document(values: dict[str, Any]) -> str:
    """Nested tables and lists of tables as TOML, each under its own header."""
    return "\n".join(_table_lines(values, "")).lstrip("\n") + "\n"


def settings_help(
    kind: type[Config], width: int = 100, *, aliases: Mapping[str, str] | None = None, leave_out: Collection[str] = ()
) -> str:
    """Every setting with its names, type, default, limits and meaning, grouped by section."""
    names = {key: f"{flag}, --{key}" for flag, key in (aliases or {}).items()}
    return "\n".join(_help_lines(kind, kind(), "", _Layout(width, names, leave_out)))


def settings_by_key(kind: type[Config], prefix: str = "") -> dict[str, FieldInfo]:
    """Every setting by its dotted key."""
    found: dict[str, FieldInfo] = {}
    for name, field in kind.model_fields.items():
        section = as_section(field)
        found |= settings_by_key(section, f"{prefix}{name}.") if section else {f"{prefix}{name}": field}
    return found


def value_at(config: Config, key: str) -> Any:
    """The value of a setting, by its dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)  # the key comes from the fields of this class
    return value


def changed_keys(old: Config, new: Config) -> list[str]:
    """The dotted keys in which two settings differ."""
    return [key for key in settings_by_key(type(old)) if value_at(old, key) != value_at(new, key)]


def as_section(field: FieldInfo) -> type[Config] | None:
    """The class of a field that is a section, None for a setting."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Config) else None


def toml_value(value: Any) -> str:
    """One value on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        # JSON's escapes are TOML's, but TOML also wants DEL escaped.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, cast(list[Any], value)))}]"
    if isinstance(value, dict):
        table = cast(dict[str, Any], value)
        pairs = (f"{_toml_key(name)} = {toml_value(inner)}" for name, inner in table.items())
        return f"{{ {', '.join(pairs)} }}" if table else "{}"
    raise UsageError(f"`{value!r}` cannot be written as TOML", hint="use text, numbers, true, false, lists and tables")


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def _table_lines(values: dict[str, Any], path: str) -> Iterator[str]:
    tables = {name: found for name, value in values.items() if (found := _as_tables(value))}
    for name, value in values.items():
        if name not in tables:
            yield f"{_toml_key(name)} = {toml_value(value)}"
    for name, found in tables.items():
        key = f"{path}{_toml_key(name)}"
        for table in found:
            if isinstance(values[name], list):
                yield f"\n[[{key}]]"
            elif not table or not all(map(_as_tables, table.values())):
                yield f"\n[{key}]"
            yield from _table_lines(table, f"{key}.")


def _as_tables(value: Any) -> list[dict[str, Any]]:
    """The table, or the tables of a list; nothing for any other value."""
    tables = cast(list[Any], value if isinstance(value, list) else [value])
    return tables if all(isinstance(table, dict) for table in tables) else []


def _lines(config: Config, default: Config, path: str) -> Iterator[str]:
    """Settings first, then sections: in TOML what follows a section's header belongs to it."""
    sections: list[tuple[str, Config, Config]] = []
    for name in type(config).model_fields:
        value, standard = getattr(config, name), getattr(default, name)
        if isinstance(value, Config):
            sections.append((name, value, standard))
        elif value is None:
            yield f"# {name} is not set"
        else:
            mark = "" if value == standard else f"  # default: {_default_text(standard)}"
            yield f"{name} = {toml_value(value)}{mark}"
    for name, section, standard in sections:
        yield f"\n[{path}{name}]"
        yield from _lines(section, standard, f"{path}{name}.")


def _default_text(value: Any) -> str:
    return "none" if value is None else toml_value(value)


@dataclass(frozen=True, slots=True)
class _Layout:
    width: int
    names: Mapping[str, str]
    """How a setting is written, where it has a short name."""
    leave_out: Collection[str]


def _help_lines(kind: type[Config], default: Config, path: str, layout: _Layout) -> Iterator[str]:
    sections: list[str] = []
    for name, field in kind.model_fields.items():
        key = f"{path}{name}"
        if key in layout.leave_out:
            continue
        if as_section(field):
            sections.append(name)
            continue
        resume = ["may change on resume"] if OnResume.MAY_CHANGE in field.metadata else []
        facts = "; ".join([f"default: {_default_text(getattr(default, name))}", *_limits(field), *resume])
        yield f"  {layout.names.get(key, f'--{key}')} {_type_text(field.annotation)}  ({facts})"
        indent = " " * 6
        yield from textwrap.wrap(field.description or "", layout.width, initial_indent=indent, subsequent_indent=indent)
    for name in sections:
        section: Config = getattr(default, name)
        heading = (type(section).__doc__ or "").strip().splitlines()
        yield f"\n[{path}{name}] {heading[0] if heading else ''}"
        yield from _help_lines(type(section), section, f"{path}{name}.", layout)


def _type_text(annotation: Any) -> str:
    if isinstance(annotation, TypeAliasType):
        return _type_text(annotation.__value__)
    origin = get_origin(annotation) or annotation
    if origin is Literal:
        return "|".join(map(str, get_args(annotation)))
    names = {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", dict: "TABLE", NoneType: "none"}
    if origin in names:
        return names[origin]
    if origin in (list, tuple):
        return "LIST"
    return "|".join(map(_type_text, get_args(annotation)))


def _limits(field: FieldInfo) -> Iterator[str]:
    """The bounds of a number, lower bound first."""
    for limit in field.metadata:
        match limit:
            case Ge(ge=bound):
                yield f"at least {bound}"
            case Gt(gt=bound):
                yield f"greater than {bound}"
            case Le(le=bound):
                yield f"at most {bound}"
            case Lt(lt=bound):
                yield f"less than {bound}"
            case _:
                pass


def expected_text(field: FieldInfo) -> str:
    """What a value must be, e.g. "an integer between 1 and 8", "a number greater than 0", "true or false"."""
    annotation = field.annotation
    members = get_args(annotation) if NoneType in get_args(annotation) else (annotation,)
    kinds = [_KINDS.get(get_origin(member) or member, "text") for member in members if member is not NoneType]
    text = f"{' or '.join(dict.fromkeys(kinds))} {_range_text(field)}".rstrip()
    return f"{text}, or none" if NoneType in members else text


_KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    dict: "a table",
    list: "a list",
    tuple: "a list",
    Path: "a path",
}


def _range_text(field: FieldInfo) -> str:
    limits = list(_limits(field))
    bounds = [limit.removeprefix("at least ").removeprefix("at most ") for limit in limits]
    if len(limits) == 2 and all(limit.startswith("at ") for limit in limits):
        return f"between {' and '.join(bounds)}"
    text = " and ".join(limits)
    return f"of {text}" if text.startswith("at ") else text
