"""The protocol of engines, which sample tokens from the policy: token ids in, token ids and logprobs out."""

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
    """0 always takes the most likely token."""
    stop_ids: frozenset[int]
    seed: int
    """The seed of this request's own random stream."""
    version: int | None = None
    """The version to sample from. The newest is used if it is None or no longer loaded."""
    affinity: str = ""
    """The same for all calls of a rollout, so that a router sends them to the server that has cached their prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What the engine sampled. The stop token, if one was sampled, is the last id."""

    token_ids: IntArray
    logprobs: FloatArray
    """The logprob of each id under the distribution it was sampled from, with temperature."""
    versions: IntArray
    finish: Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOverflow:
    """The prompt leaves no room for even one new token."""

    prompt_tokens: int
    context_length: int


class Engine(Protocol):
    """Samples from the policy for the gateway. Cancelling `generate` drops the request."""

    @property
    def context_length(self) -> int: ...

    @property
    def version(self) -> int:
        """The version of the weights published last."""
        ...

    @property
    def down_s(self) -> float:
        """The total time in seconds in which it was unreachable."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation | ContextOverflow: ...

    async def publish(self, adapter_dir: Path, version: int) -> None:
        """Serve the LoRA adapter in this folder from now on. No state computed under older weights survives."""
        ...

    async def close(self) -> None: ...
