"""Environment variables for Harbor and its dependencies: no telemetry, no price list fetched on import."""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

from dockyard.settings.load import read_dotenv

QUIET = {"HARBOR_TELEMETRY": "off", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def hush() -> None:
    """Set the variables for the rest of the process, except those that the user has set."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


class _SharedVariables:
    """The variables that calls in this process have added to the environment. The last call to end removes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_calls = 0
        self._added: set[str] = set()

    @contextmanager
    def borrowed(self) -> Generator[None]:
        with self._lock:
            before = set(os.environ)
            read_dotenv()
            hush()
            self._added |= set(os.environ) - before
            self._num_calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_calls -= 1
                if not self._num_calls:
                    for name in self._added:
                        os.environ.pop(name, None)
                    self._added.clear()


_VARIABLES = _SharedVariables()


@contextmanager
def harbor_environment() -> Generator[None]:
    """Set Harbor's variables and those of `.env` inside the block. Variables that the user has set are not changed."""
    with _VARIABLES.borrowed():
        yield
