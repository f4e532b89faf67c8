"""One command a turn, as words alone: what the `shell` agent runs where `commands` names what it may run.

Nothing is left to a shell but the words themselves, so that no `$(...)`, pipe, loop or pattern does several turns' work
in one.
"""

import shlex
from collections.abc import Sequence

_OPERATORS = "();<>|&"


def one_command(text: str, allowed: Sequence[str]) -> str | None:
    """The command with each word quoted; None unless it is one of these, with at most a `> FILE` at its end."""
    words = _words(text)
    if not words or words[0] not in allowed:
        return None
    if len(words) > 2 and words[-2] == ">":
        words, target = words[:-2], f" > {shlex.quote(words[-1])}"
    else:
        target = ""
    if any(set(word) <= set(_OPERATORS) for word in words):
        return None
    return shlex.join(words) + target


def rule(allowed: Sequence[str]) -> str:
    """What the model is told when its command is not run."""
    return f"Only one command at a time: {' or '.join(allowed)}, with at most one > FILE."


def _words(text: str) -> list[str]:
    """None where there are several lines, or a quote that does not end."""
    if "\n" in text.strip():
        return []
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:
        return []
