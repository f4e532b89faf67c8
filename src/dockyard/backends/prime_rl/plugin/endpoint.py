"""verifiers' endpoint as our gateway's source of text: it draws tokens from the policy and keeps them on the trace."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import verifiers.v1 as vf

from dockyard.engine.openai import TextEndpoint
from dockyard.engine.server import Server
from dockyard.errors import EngineError
from dockyard.gateway.calls import RefusedError
from dockyard.gateway.history import Json
from dockyard.gateway.ledger import Limits
from dockyard.gateway.recall import Recall
from dockyard.gateway.sessions import Sampling
from dockyard.gateway.text_mode import TextSession

_OVERFLOW = "context_length"
"""What verifiers calls the end of a rollout whose prompt does not fit any more."""


@dataclass(frozen=True, slots=True)
class Interception:
    """Implements `TextSource` for one rollout."""

    endpoint: TextEndpoint
    trace: vf.Trace

    @property
    def down_s(self) -> float:
        return self.endpoint.down_s

    async def chat(self, body: Json) -> Json:
        try:
            return await self.endpoint.chat(body)
        except EngineError as error:
            stopped = self.trace.stop_condition
            if stopped is None or stopped == _OVERFLOW:  # the session knows an overflow by its words
                raise
            # A limit of verifiers', which the policy has reached: no failure of the engine.
            raise RefusedError(403, "calls_limit_reached", f"verifiers ended this rollout: {stopped}") from error

    def open_session(self, label: str, sampling: Sampling, limits: Limits) -> TextSession:
        """verifiers knows a history by its messages, so that it gets its own turns back word for word."""
        return TextSession(label, sampling, limits, self, Recall())


@asynccontextmanager
async def intercepted(url: str, secret: str, trace: vf.Trace, *, retry_s: float) -> AsyncGenerator[Interception]:
    """The endpoint of one rollout. An engine that fails for longer than `retry_s` has failed."""
    server = Server(url, api_key=secret, retry_s=retry_s)
    try:
        yield Interception(TextEndpoint(server, "policy"), trace)  # verifiers puts the true name there
    finally:
        await server.close()
