"""What a run was made with: recorded at its start, compared when it is resumed."""

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("dockyard", "harbor", "torch", "transformers", "peft", "tokenizers", "numpy")


def versions() -> dict[str, str | None]:
    """Versions by name, None for what is not installed. Imports none of them."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{package: _version(package) for package in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
