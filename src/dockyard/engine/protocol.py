"""The protocols of engines, which sample tokens from the policy: token ids in, token ids and logprobs out.

`Engine` is what the gateway and the trainer use. `CustomEngine` is what the class that `engine.type = "module:Class"`
names must define.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dockyard.config import ModelConfig
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
    """The version of the weights that sampled each id: as published, 0 before anything was published."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The first argument of a custom engine's constructor. The others are `engine.kwargs`."""

    model_dir: Path
    """The folder of the model: `config.json`, tokenizer and weights."""
    model: ModelConfig
    """The section `model` of the settings: name, dtype and device."""
    context_length: int
    """The maximum number of prompt and sampled tokens together."""
    lora_rank: int
    """The rank of the adapters that will be published."""
    num_versions: int
    """How many versions of the weights are sampled from at the same time. Keep as many loaded, if you can."""


class CustomEngine(Protocol):
    """The methods of a class that `engine.type` names. It is created in the event loop, with an `EngineSetup`."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample from the policy. Many calls run concurrently, and one that is cancelled must stop.

        The prompt leaves room for `max_new_tokens` in the context.
        """
        ...

    async def publish(self, folder: Path, version: int) -> None:
        """Sample from the weights in this folder from now on, and discard the KV cache of older weights.

        The folder holds a LoRA adapter in PEFT's format; with `trainer.method = "full"`, a whole model.
        """
        ...

    async def close(self) -> None:
        """Free what the engine holds."""
        ...
