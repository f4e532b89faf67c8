"""What ends a run: a message that names the thing, and the next command to try."""

from typing import Any


class DockyardError(Exception):
    """The run cannot go on. Shown as `error: message` and `hint: hint`, without a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.add_note(f"hint: {hint}")  # for tracebacks: other engines' processes show nothing else

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross processes there, too, whatever their constructors ask for."""
        return _blank, (type(self), self.message), self.__dict__


class UsageError(DockyardError):
    """The command line or the run file is wrong."""

    exit_code = 2


class EngineError(DockyardError):
    """The engine died or cannot serve."""


def _blank(kind: type[DockyardError], message: str) -> DockyardError:
    return kind.__new__(kind, message)
