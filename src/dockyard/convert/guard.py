"""The last resort: what nobody thought of in one attempt's files costs that attempt, not the conversion."""

import logging
from collections.abc import Callable

from dockyard.convert.conversation import Converted
from dockyard.convert.tokens import skip
from dockyard.types import Rollout

logger = logging.getLogger(__name__)


def guarded(found: Converted, convert: Callable[[], Converted]) -> Converted:
    """What `convert` gives; where it breaks, `found` as unreadable."""
    try:
        return convert()
    except Exception as error:  # agents write these files and may write anything: no list of errors is complete
        logger.debug("%s", found.where, exc_info=True)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return skip(found, "unreadable", f"{found.where}: {reason}")


def blank(where: str, *, trial: str = "", task: str = "", agent: str = "", model: str = "") -> Converted:
    """An attempt of which no more is known."""
    rollout = Rollout(task=task, kind="", attempt=0, segments=(), reward=None, failure=None)
    return Converted(where=where, trial=trial, agent=agent, model=model, rollout=rollout)
