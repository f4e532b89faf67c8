"""Options that a run file hands to a constructor. Many constructors swallow those that they do not have."""

import difflib
from collections.abc import Collection, Iterable
from inspect import Parameter, signature

from dockyard.errors import UsageError

_GATHERS = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def options_of(made: type) -> set[str]:
    """What may be left out when one is made, its bases' options included."""
    found: dict[str, Parameter] = {}
    for base in reversed(made.__mro__[:-1]):  # the last is `object`
        if "__init__" in vars(base):
            found |= signature(vars(base)["__init__"]).parameters
    return {name for name, one in found.items() if one.default is not Parameter.empty and one.kind not in _GATHERS}


def check_options(setting: str, given: Iterable[str], known: Collection[str], *, of: str) -> None:
    """Refuse an option that would have no effect, or that is not for users."""
    for name in given:
        if name not in known:
            raise UsageError(f"`{setting}.{name}` is no option of `{of}`", hint=nearest(name, sorted(known)))


def nearest(name: str, known: list[str]) -> str:
    """A hint for who misspelt a name."""
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
