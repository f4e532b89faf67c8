"""The wire formats that agents use, one file each, and the table of the paths that they are served on.

To add a dialect, write a file with a class that implements `Dialect` and add a line to `ROUTES`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dockyard.gateway.dialects.chat import ChatDialect
from dockyard.gateway.dialects.messages import MessagesDialect
from dockyard.gateway.dialects.responses import ResponsesDialect
from dockyard.gateway.protocol import AdvertisedModel, Dialect


@dataclass(frozen=True, slots=True)
class DialectRoute:
    """A path, and the dialect of its requests."""

    path: str
    dialect: Callable[[AdvertisedModel], Dialect]
    counts_tokens: bool = False
    """Whether the path returns the length of the prompt instead of a reply."""


ROUTES = (
    DialectRoute("/v1/chat/completions", ChatDialect),
    DialectRoute("/v1/messages", MessagesDialect),
    DialectRoute("/v1/messages/count_tokens", MessagesDialect, counts_tokens=True),
    DialectRoute("/v1/responses", ResponsesDialect),
)
