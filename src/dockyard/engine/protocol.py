"""What samples tokens from the policy: token ids in, token ids and logprobs out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dockyard.types import Finish, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One model call."""

    prompt_ids: IntArray
    max_new_tokens: int
    temperature: float
    """0 takes the likeliest token each time."""
    stop_ids: frozenset[int]
    seed: int
    """Of this request's own random stream."""
    version: int | None = None
    """Weights to sample from, if the engine still has them. None, or gone: the newest."""
    affinity: str = ""
    """What the calls of one rollout have in common: a router sends them where their prefix is cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What the engine sampled. The stop token, if one was drawn, is the last id."""

    token_ids: IntArray
    logprobs: FloatArray
    """Of each id under the distribution it was drawn from (temperature applied)."""
    versions: IntArray
    finish: Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOverflow:
    """The prompt leaves no room for even one new token."""

    prompt_tokens: int
    context_length: int


class Engine(Protocol):
    """The seam between the gateway and whatever samples. Cancelling `generate` drops the request."""

    @property
    def context_length(self) -> int: ...

    @property
    def version(self) -> int:
        """Of the weights published last."""
        ...

    @property
    def down_s(self) -> float:
        """For how many seconds in all it has been out of reach so far."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation | ContextOverflow: ...

    async def publish(self, adapter_dir: Path, version: int) -> None:
        """Serve the LoRA adapter in this folder from now on. No state computed under older weights survives."""
        ...

    async def close(self) -> None: ...
