"""What ends a run: a message that names what is wrong, and a hint with the next command to try."""

from typing import Any


class DockyardError(Exception):
    """The run cannot continue. The command line shows `error: message` and `hint: hint`, without a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.add_note(f"hint: {hint}")  # for tracebacks, the only thing that processes of other engines show

    def __reduce__(self) -> tuple[Any, ...]:
        """Make errors picklable, whatever arguments their constructors take: they cross processes."""
        return _blank, (type(self), self.message), self.__dict__


class UsageError(DockyardError):
    """The command line, the run file or an argument is wrong."""

    exit_code = 2


class StopRun(DockyardError):  # noqa: N818  (a request, not an error)
    """Raise it in a callback to end the run early, without an error.

    What was recorded is kept, and `--resume` continues the run. Rollouts in progress are cancelled, and the evaluation
    after training is left out. A training run still writes its summary.
    """

    def __init__(self, reason: str = "no reason given") -> None:
        super().__init__(reason, hint="`--resume RUN_DIR` continues the run")


class EngineError(DockyardError):
    """The engine died or cannot sample."""


def _blank(kind: type[DockyardError], message: str) -> DockyardError:
    return kind.__new__(kind, message)
