"""Where fetched models and datasets are kept."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`DOCKYARD_CACHE`, or a folder in the user's own."""
    return Path(os.environ.get("DOCKYARD_CACHE") or "~/.cache/dockyard").expanduser()
