"""Check the arguments of the Python functions that are not settings. Each mistake is a UsageError."""

import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from dockyard.errors import UsageError

_MAX_SHOWN = 60


def path_argument(name: str, value: object, *, hint: str) -> Path:
    """Return the argument as a path. It must be text or path-like, and not empty."""
    text = _path_text(value)
    if not text:
        raise argument_error(name, value, "a path", hint=hint)
    return Path(text)


def _path_text(value: object) -> str | None:
    if not isinstance(value, str | os.PathLike):
        return None
    text = os.fspath(cast(str | os.PathLike[str], value))
    return text if isinstance(text, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]


def optional_path(name: str, value: object, *, hint: str) -> Path | None:
    """Return the argument as a path, or None if it is None."""
    return None if value is None else path_argument(name, value, hint=hint)


def flag_argument(name: str, value: object) -> bool:
    """Return the argument, which must be True or False: any other text, such as "no", would count as True."""
    if not isinstance(value, bool):
        raise argument_error(name, value, "True or False", hint=f"`{name}=True` or `{name}=False`")
    return value


def count_argument(name: str, value: object, *, hint: str) -> int | None:
    """Return the argument as an integer of at least 1, or None if it is None."""
    if value is None:
        return None
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        number = 0
    if number < 1:
        raise argument_error(name, value, "an integer of at least 1", hint=hint)
    return number


def choice_argument(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise UsageError unless the argument is one of the choices."""
    if value not in choices:
        expected = " or ".join(f"`{choice}`" for choice in choices)
        raise argument_error(name, value, expected, hint=" or ".join(f'`{name}="{choice}"`' for choice in choices))


def argument_error(name: str, value: object, expected: str, *, hint: str) -> UsageError:
    """Return an error that names the argument, its value and what it must be."""
    text = value if isinstance(value, str) else repr(value)
    shown = text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
    is_value = f"is `{shown}`" if text else "is empty"
    return UsageError(f"`{name}` {is_value}; it must be {expected}", hint=hint)
