"""What ends a run: a message that names the thing, and the next command to try."""


class DockyardError(Exception):
    """The run cannot go on. Shown as `error: message` and `hint: hint`, without a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(DockyardError):
    """The command line or the run file is wrong."""

    exit_code = 2


class EngineError(DockyardError):
    """The engine died or cannot serve."""
