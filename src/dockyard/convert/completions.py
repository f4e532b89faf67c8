"""The model calls that OpenHands logged (`agent/completions`): what was really sent and answered.

Its trajectory is made from events instead, and says `Running command: ls` where the model said something else.
"""

import json
from pathlib import Path

from dockyard.convert.atif import UnreadableError
from dockyard.convert.exchanges import conversations_of
from dockyard.convert.told import Told
from dockyard.gateway.history import Json


def read_completions(folder: Path) -> Told:
    """Raises `UnreadableError`."""
    files = sorted(folder.glob("*.json"), key=lambda file: (_when(file), file.name))
    exchanges = [_exchange(file) for file in files]
    model = next((str(exchange["model"]) for exchange in exchanges if exchange["model"]), "")
    try:
        return Told(conversations=conversations_of(exchanges), model=model)
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"`{folder}` holds messages of no known form: {type(error).__name__}: {error}") from error


def _when(file: Path) -> float:
    """The names end with the time."""
    try:
        return float(file.stem.rpartition("-")[2])
    except ValueError:
        return 0.0


def _exchange(file: Path) -> Json:
    try:
        logged: Json = json.loads(file.read_bytes())
        response: Json = logged["response"]
        choice: Json = response["choices"][0]
        settings: Json = logged.get("kwargs") or {}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnreadableError(f"`{file}` is no logged model call: {type(error).__name__}: {error}") from error
    return {
        "messages": logged.get("messages"),
        "tools": settings.get("tools") or [],
        "reply": choice.get("message"),
        "finish": choice.get("finish_reason"),
        "model": response.get("model"),
    }
