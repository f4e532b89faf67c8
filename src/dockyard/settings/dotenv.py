"""Keys that a `.env` in the current folder holds."""

from pathlib import Path

from dotenv import load_dotenv

from dockyard.errors import UsageError


def read_dotenv() -> None:
    """Put them into the environment. What is set already stays."""
    file = Path.cwd() / ".env"
    try:
        load_dotenv(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"`{file}` cannot be read: {error}", hint="it holds lines such as `NAME=value`") from error
