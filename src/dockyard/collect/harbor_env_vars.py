"""Environment variables for Harbor and its dependencies: no telemetry, no download of a price list on import."""

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
    def applied(self) -> Generator[None]:
        """Set Harbor's variables and those of `.env` inside the block. Variables of the user are not changed."""
        with self._lock:
            before = {*os.environ}
            read_dotenv()
            hush()
            self._added |= {*os.environ} - before
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


harbor_environment = _SharedVariables().applied
