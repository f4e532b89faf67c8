"""What a client asks of sampling. In a rollout nobody listens: sampling is the trainer's. A stand-alone server does."""

import logging
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, Field

from dockyard.gateway.calls import validate

log = logging.getLogger(__name__)

_GREEDY_BELOW = 1e-5
"""A temperature that small would overflow what it divides, and means 0."""

UNSERVED: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ("", []),
    "stop_sequences": ([],),
    "top_logprobs": (0,),
    "tool_choice": ("auto", {"type": "auto"}),
    "response_format": ({"type": "text"},),
}
"""Parameters that no engine here is given, with the values that ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Sampling as the client wants it; None where it did not say."""

    temperature: float | None = None
    seed: int | None = None


NO_WISHES = Wishes()


class _Body(BaseModel):
    temperature: float | None = Field(default=None, ge=0, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)


class WishReader:
    """Reads wishes out of any dialect's body, and says once about each kind that it goes unheard."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def read(self, body: object) -> Wishes:
        wire = validate(_Body, body)
        for name, value in cast("dict[str, Any]", body).items():
            if name in UNSERVED and value is not None and value not in UNSERVED[name]:
                self._say_unserved(name, value)
        temperature = wire.temperature
        if temperature is not None and temperature < _GREEDY_BELOW:
            temperature = 0.0
        return Wishes(temperature=temperature, seed=None if wire.seed is None else wire.seed % 2**63)

    def _say_unserved(self, name: str, value: object) -> None:
        if name not in self._said:
            self._said.add(name)
            log.warning("a client asks for `%s` %.60r, which has no effect here (said once)", name, value)
