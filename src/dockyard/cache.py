"""The folder of downloaded models and datasets."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return `DOCKYARD_CACHE`, or `~/.cache/dockyard`."""
    return Path(os.environ.get("DOCKYARD_CACHE") or "~/.cache/dockyard").expanduser()
