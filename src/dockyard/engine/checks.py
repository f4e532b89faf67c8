"""Checks of a server before a run samples from it. Each error says how to start the server."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer

from dockyard.config import EngineConfig
from dockyard.engine.http import ModelServer
from dockyard.engine.protocol import GenerateRequest
from dockyard.engine.remote_engine import Ask, Draw, RemoteEngine, ServedModel, Wire, models_in, read_draw
from dockyard.errors import EngineError

# Covers what tokenizers treat differently: capitals, digits, runs of spaces, letters outside ASCII.
PROBE_TEXT = "def Main():\n        return 'naïve' + str(1234567)  # → 42\n"
_TOP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequirements:
    """What a run requires of a server."""

    model: str
    """The name of the model, for hints."""
    lora_rank: int
    text: str
    token_ids: Sequence[int]
    """The token ids of `text` by the run's own tokenizer."""
    num_versions: int = 1
    """Versions of the weights that are sampled from at the same time."""

    @classmethod
    def of(cls, model: str, model_dir: Path, lora_rank: int, num_versions: int = 1) -> Self:
        """The requirements for the model in this folder."""
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        token_ids = tokenizer.encode(PROBE_TEXT, add_special_tokens=False).ids
        return cls(model=model, lora_rank=lora_rank, text=PROBE_TEXT, token_ids=token_ids, num_versions=num_versions)


async def open_checked(
    server: ModelServer, wire: Wire, config: EngineConfig, required: ServerRequirements, *, logprobs_hint: str
) -> RemoteEngine:
    """Check a server that takes new weights, and return an engine over it."""
    start = f"start the server with `{wire.command(required.model, required.lora_rank)}`"
    served = served_as(server, config, await find_card(server, config, hint=start))
    check_ids(server, await tokenize(server, served, required.text), required, hint=start)
    await check_logprobs(server, wire, served, required, hint=logprobs_hint)
    return RemoteEngine(server, wire, served, num_versions=required.num_versions)


async def find_card(server: ModelServer, config: EngineConfig, *, hint: str) -> Mapping[str, Any]:
    """The server's entry for the model to sample from. `hint` is for a server that does not answer."""
    try:
        answer = await server.get("/v1/models", patient=False)
    except EngineError as error:
        raise EngineError(error.message, hint=hint) from error
    if answer.status == 404 and config.model:
        return {"id": config.model}
    cards = {str(card["id"]): card for card in models_in(server, answer) if not card.get("parent")}
    name = config.model or (next(iter(cards)) if len(cards) == 1 else None)
    if name not in cards:
        listed = ", ".join(f"`{name}`" for name in list(cards)[:8]) + (", ..." if len(cards) > 8 else "")
        offer = f"no `{config.model}`" if config.model else f"{len(cards)} models"
        raise EngineError(f"`{server.url}` serves {offer}: {listed}", hint="`--engine.model` names the one to sample")
    return cards[name]


def served_as(server: ModelServer, config: EngineConfig, card: Mapping[str, Any]) -> ServedModel:
    """The model's name on the server, and the context length to use."""
    limit, wanted = card.get("max_model_len"), config.context_length
    if limit is None and wanted is None:
        raise EngineError(
            f"`{server.url}` does not report its context length",
            hint="set `--engine.context_length`: the tokens of prompt and answer together",
        )
    if limit is not None and wanted is not None and wanted > limit:
        raise EngineError(
            f"`engine.context_length` is {wanted}, and `{server.url}` has {limit}",
            hint="`--engine.context_length none`, or give the server a longer context",
        )
    return ServedModel(name=str(card["id"]), context_length=int(wanted or limit or 0))


async def tokenize(server: ModelServer, served: ServedModel, text: str) -> list[int]:
    """Tokenize text with the server's own tokenizer."""
    body = {"model": served.name, "prompt": text, "add_special_tokens": False}
    answer = await server.post("/tokenize", body)
    match answer.body:
        case {"tokens": [*token_ids]} if answer.ok:
            return token_ids
        case _:
            raise EngineError(
                f"`{server.url}/tokenize` does not tokenize: {answer.reason}",
                hint="start the server with its tokenizer (without `--skip-tokenizer-init`)",
            )


def check_ids(server: ModelServer, token_ids: Sequence[int], required: ServerRequirements, *, hint: str) -> None:
    """Raise an error if the server's token ids differ from ours."""
    if list(token_ids) != list(required.token_ids):
        raise EngineError(
            f"`{server.url}` has another tokenizer than `{required.model}`: {required.text!r} is {list(token_ids)} "
            f"there and {list(required.token_ids)} here",
            hint=hint,
        )


async def check_logprobs(
    server: ModelServer, wire: Wire, served: ServedModel, required: ServerRequirements, *, hint: str
) -> None:
    """Raise an error if the server reports the logprobs of the model, not of the distribution it samples from."""
    cool, warm = [await _probe(server, wire, served, required, temperature) for temperature in (1.0, 2.0)]
    if not are_logprobs(cool.top) or not are_tempered(cool.top, warm.top):
        raise EngineError(
            f"`{server.url}` sends logprobs without the temperature: not those of the distribution it samples from",
            hint=hint,
        )


async def _probe(
    server: ModelServer, wire: Wire, served: ServedModel, required: ServerRequirements, temperature: float
) -> Draw:
    request = GenerateRequest(
        prompt_ids=np.array(required.token_ids, dtype=np.int32),
        max_new_tokens=1,
        temperature=temperature,
        stop_ids=frozenset(),
        seed=0,
    )
    ask = Ask(request=request, model=served.name, top=_TOP)
    answer = await server.post(wire.generate_path, wire.body(ask))
    if answer.status == 404:
        raise EngineError(
            f"`{server.url}{wire.generate_path}` does not exist: {answer.reason}",
            hint=f"start the server with `{wire.command(required.model, required.lora_rank)}`",
        )
    return read_draw(server, wire, answer)


def are_logprobs(top: Mapping[str, float]) -> bool:
    """Whether these can be the logprobs of different tokens at one position; logits usually cannot."""
    return len(top) > 1 and sum(math.exp(min(logprob, 1.0)) for logprob in top.values()) < 1.01


def are_tempered(cool: Mapping[str, float], warm: Mapping[str, float]) -> bool:
    """Whether doubling the temperature halves the distance between the same two tokens."""
    shared = sorted(cool.keys() & warm.keys(), key=lambda token: cool[token])
    if len(shared) < 2:
        return False
    last, first = shared[0], shared[-1]
    return warm[first] - warm[last] < 0.75 * (cool[first] - cool[last])
