"""Which column of a dataset is which: by name, by a common alias, or as `--map ours=theirs` says; never by a guess."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dockyard.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column we read."""

    name: str
    about: str
    """What it holds, for people."""
    aliases: tuple[str, ...] = ()
    """What other datasets call it."""
    needed: bool = True


def match_columns(
    columns: Sequence[Column], found: Collection[str], mapping: Mapping[str, str], where: str
) -> dict[str, str]:
    """Our names to theirs, for the columns that are there. Two candidates for one column are an error."""
    _check_mapping(columns, found, mapping, where)
    matched: dict[str, str] = {}
    for column in columns:
        theirs = [mapping[column.name]] if column.name in mapping else _candidates(column, found, mapping)
        if len(theirs) > 1:
            names = " and ".join(f"`{name}`" for name in theirs)
            raise UsageError(
                f"`{where}` has {names}: either may be `{column.name}` ({column.about})",
                hint=f"say which: `--map {column.name}={theirs[0]}`",
            )
        if theirs:
            matched[column.name] = theirs[0]
    missing = [column for column in columns if column.needed and column.name not in matched]
    if missing:
        raise unknown_layout(columns, found, missing, where)
    return matched


def parse_mapping(words: Sequence[str]) -> dict[str, str]:
    """`ours=theirs`, each as `--map` takes it."""
    mapping: dict[str, str] = {}
    for word in words:
        ours, is_pair, theirs = word.partition("=")
        if not is_pair or not ours or not theirs:
            raise UsageError(f"`--map {word}` is not `ours=theirs`", hint="for example `--map bug_patch=patch`")
        if mapping.get(ours, theirs) != theirs:
            raise UsageError(f"`--map` gives `{ours}` twice: `{mapping[ours]}` and `{theirs}`", hint="leave one out")
        mapping[ours] = theirs
    return mapping


def unknown_layout(
    columns: Sequence[Column], found: Collection[str], missing: Sequence[Column], where: str
) -> UsageError:
    """What was found, what is needed, and how to say which is which."""
    lacks = ", ".join(f"`{column.name}`" for column in missing)
    there = ", ".join(f"`{name}`" for name in found) or "none"
    needed = "; ".join(_described(column) for column in columns if column.needed or column in missing)
    theirs = difflib.get_close_matches(missing[0].name, list(found), 1, cutoff=0.0) or ["THEIRS"]
    return UsageError(
        f"`{where}` has no column {lacks}\ncolumns found: {there}\ncolumns needed: {needed}",
        hint=f"say which column it is, for example `--map {missing[0].name}={theirs[0]}`",
    )


def _described(column: Column) -> str:
    also = f", also called {', '.join(f'`{name}`' for name in column.aliases)}" if column.aliases else ""
    return f"`{column.name}` ({column.about}{also})"


def _candidates(column: Column, found: Collection[str], mapping: Mapping[str, str]) -> list[str]:
    """Our own name wins over aliases; a column that was mapped to another name of ours is no longer free."""
    taken = set(mapping.values())
    free = [name for name in (column.name, *column.aliases) if name in found and name not in taken]
    return free[:1] if column.name in free else free


def _check_mapping(columns: Sequence[Column], found: Collection[str], mapping: Mapping[str, str], where: str) -> None:
    ours = [column.name for column in columns]
    for name, theirs in mapping.items():
        if name not in ours:
            near = difflib.get_close_matches(name, ours, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"ours are {', '.join(f'`{each}`' for each in ours)}"
            raise UsageError(f"`--map {name}={theirs}`: `{name}` is not a column of ours", hint=hint)
        if theirs not in found:
            there = ", ".join(f"`{each}`" for each in found)
            raise UsageError(f"`--map {name}={theirs}`: `{where}` has no column `{theirs}`", hint=f"it has {there}")
