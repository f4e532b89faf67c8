"""Your own engine: the class that `engine.type = "module:Class"` names.

`CustomEngine` in `protocol.py` lists its methods. `CheckedEngine` makes an `Engine` of it and checks every result, so
that a mistake in the class is an error that names it, not a policy that is trained on the wrong tokens.
"""

import asyncio
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dockyard.config import EngineConfig
from dockyard.engine.protocol import ContextOverflow, CustomEngine, EngineSetup, GenerateRequest, Generation
from dockyard.engine.remote_engine import NO_LOGPROB
from dockyard.errors import DockyardError, EngineError, UsageError
from dockyard.extension import constructor_problem, create, load_class
from dockyard.types import Finish, IntArray

_SETTING = "engine.type"
_NUM_DRAWS = 8
_COOL, _WARM = 0.5, 1.0
_TOLERANCE = 0.5
"""In nats. The same logprob, computed in another batch in bfloat16, differs by less."""
_CERTAIN = -0.05
"""The logprob from which on a temperature changes too little to be seen."""
_MOST_TOTAL = 1.1
"""What the probabilities of different tokens may add up to, with rounding."""
_MOST_LOGPROB = 0.01
"""Rounding may make the logprob of a certain token slightly positive."""


def check_engine(config: EngineConfig) -> None:
    """Raise an error that shows the right signature if `engine.type` names a class that is not an engine."""
    if config.is_custom:
        _load(config)


def _load(config: EngineConfig) -> type[Any]:
    """Load the class, and check that it can be created with `engine.kwargs`."""
    kind = load_class(config.type, _SETTING, CustomEngine)
    if problem := constructor_problem(kind, "setup", **config.kwargs):
        given = "".join(f", {name}=..." for name in config.kwargs)
        raise UsageError(
            f"`{_SETTING}` is `{config.type}`, which cannot be created as `{kind.__name__}(setup{given})`: {problem}",
            hint="define `def __init__(self, setup: EngineSetup, ...)`; its other arguments are `engine.kwargs`",
        )
    return kind


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the files of a model say about its tokens."""

    vocab_size: int
    context_length: int | None

    @classmethod
    def read(cls, model_dir: Path) -> "ModelLimits":
        config = json.loads((model_dir / "config.json").read_text())
        text = config.get("text_config", config)
        known = Tokenizer.from_file(str(model_dir / "tokenizer.json")).get_vocab_size()
        return cls(text.get("vocab_size", known), text.get("max_position_embeddings"))


def context_length(config: EngineConfig, limits: ModelLimits) -> int:
    """The context length to use: that of the settings, else that of the model."""
    wanted, limit = config.context_length, limits.context_length
    if wanted is None and limit is None:
        raise EngineError(
            "the model's `config.json` has no `max_position_embeddings`",
            hint="set `--engine.context_length`: the tokens of prompt and answer together",
        )
    if wanted is not None and limit is not None and wanted > limit:
        raise EngineError(
            f"`engine.context_length` is {wanted}, and the model has {limit}", hint="`--engine.context_length none`"
        )
    return wanted or limit or 0


async def open_custom(
    config: EngineConfig, setup: EngineSetup, vocab_size: int, probe_ids: Sequence[int]
) -> "CheckedEngine":
    """Create the engine that `engine.type` names, and check it with a few generations of one token."""
    kind = _load(config)
    made: CustomEngine = create(kind, config.type, _SETTING, setup, **config.kwargs)
    engine = CheckedEngine(made, config.type, context_length=setup.context_length, vocab_size=vocab_size)
    try:
        await _check_sampling(engine, probe_ids)
    except BaseException:
        await engine.close()
        raise
    return engine


class CheckedEngine:
    """Implements `Engine` with a `CustomEngine`."""

    def __init__(self, engine: CustomEngine, name: str, *, context_length: int, vocab_size: int) -> None:
        """`name` is the reference in the settings, for errors."""
        self._engine = engine
        self.name = name
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._version = 0

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def version(self) -> int:
        return self._version

    @property
    def down_s(self) -> float:
        return 0.0

    async def generate(self, request: GenerateRequest) -> Generation | ContextOverflow:
        room = self._context_length - len(request.prompt_ids)
        if room < 1:
            return ContextOverflow(prompt_tokens=len(request.prompt_ids), context_length=self._context_length)
        request = replace(request, max_new_tokens=min(request.max_new_tokens, room))
        oldest = self._version if request.version is None else min(self._version, request.version)
        with _naming(f"{self.name}.generate"):
            found: object = await self._engine.generate(request)
        return self._checked(found, request, oldest)

    async def publish(self, adapter_dir: Path, version: int) -> None:
        with _naming(f"{self.name}.publish"):
            await self._engine.publish(adapter_dir, version)
        self._version = version

    async def close(self) -> None:
        with _naming(f"{self.name}.close"):
            await self._engine.close()

    def _checked(self, found: object, request: GenerateRequest, oldest: int) -> Generation:
        """The generation with arrays of our types. `oldest` is the version that its tokens must have at least."""
        if not isinstance(found, Generation):
            raise self.error(f"returned `{type(found).__name__}`")
        ids, logprobs, versions = np.asarray(found.token_ids), np.asarray(found.logprobs), np.asarray(found.versions)
        found = replace(found, token_ids=ids, logprobs=logprobs, versions=versions)
        if problem := _shape_problem(found) or self._content_problem(found, request, oldest):
            raise self.error(problem)
        # A token that is taken because it is the most likely is certain, whatever its probability was.
        logprobs = np.zeros(len(ids)) if request.temperature == 0 else np.minimum(logprobs, 0)
        return Generation(
            token_ids=ids.astype(np.int32),
            logprobs=logprobs.astype(np.float32),
            versions=versions.astype(np.int32),
            finish=found.finish,
        )

    def _content_problem(self, found: Generation, request: GenerateRequest, oldest: int) -> str | None:
        ids, logprobs, versions = found.token_ids, found.logprobs, found.versions
        stops = [index for index, token_id in enumerate(ids.tolist()) if token_id in request.stop_ids]
        problems = {
            f"returned {len(ids)} tokens; `max_new_tokens` is {request.max_new_tokens}": (
                not 0 < len(ids) <= request.max_new_tokens
            ),
            f"returned the token id {_outside(ids, self._vocab_size)}; the model has {self._vocab_size} tokens": (
                _outside(ids, self._vocab_size) is not None
            ),
            "returned sampled tokens without a logprob (NaN, infinite, or -9999)": (
                not np.isfinite(logprobs).all() or (logprobs <= NO_LOGPROB).any()
            ),
            f"returned the logprob {logprobs.max(initial=-1):g}: a logprob is at most 0": (
                logprobs.max(initial=-1) > _MOST_LOGPROB
            ),
            f"continued after the stop token {ids[stops[0]] if stops else ''}": bool(stops) and stops[0] < len(ids) - 1,
            f"returned `{found.finish!r}` as finish, not a `Finish`": type(found.finish) is not Finish,
            f"sampled from version {versions.min(initial=oldest)} although {oldest} was published before the call": (
                versions.min(initial=oldest) < oldest
            ),
            f"sampled from version {versions.max(initial=0)}; the newest is {self._version}": (
                versions.max(initial=0) > self._version
            ),
        }
        return next((text for text, holds in problems.items() if holds), None)

    def error(self, problem: str) -> EngineError:
        """An error about what `generate` returned."""
        hint = "`Generation` in `dockyard.engine.protocol` says what each field must be"
        return EngineError(f"`{self.name}.generate` {problem}", hint=hint)


def _shape_problem(found: Generation) -> str | None:
    ids, logprobs, versions = found.token_ids, found.logprobs, found.versions
    if not ids.ndim == logprobs.ndim == versions.ndim == 1:
        return f"returned arrays with {ids.ndim}, {logprobs.ndim} and {versions.ndim} dimensions; each must have 1"
    if not len(ids) == len(logprobs) == len(versions):
        return f"returned {len(ids)} token ids with {len(logprobs)} logprobs and {len(versions)} versions"
    if len(ids) and not (ids.dtype.kind in "iu" and versions.dtype.kind in "iu" and logprobs.dtype.kind == "f"):
        return f"returned token ids of type {ids.dtype}, logprobs of {logprobs.dtype}, versions of {versions.dtype}"
    return None


def _outside(ids: IntArray, vocab_size: int) -> int | None:
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    return int(wrong[0]) if len(wrong) else None


async def _check_sampling(engine: CheckedEngine, probe_ids: Sequence[int]) -> None:
    """Check that logprobs are those of one distribution per temperature, and that 0 takes the most likely token."""
    cool, warm = await _draws(engine, probe_ids, _COOL), await _draws(engine, probe_ids, _WARM)
    first, second = [next(iter(await _draws(engine, probe_ids, 0.0, num=1))) for _ in range(2)]
    if first != second:
        raise engine.error(f"returned the tokens {first} and {second} for the same prompt with temperature 0")
    # A token that was not sampled has at most what the others leave.
    rest = log(max(1 - sum(map(exp, cool.values())), 1e-6))
    likeliest = max(cool, key=lambda token_id: cool[token_id])
    if cool[likeliest] - cool.get(first, rest) > _TOLERANCE:
        raise engine.error(f"returned the token {first} with temperature 0, but {likeliest} is more likely")
    for draws in (cool, warm):
        if (total := sum(map(exp, draws.values()))) > _MOST_TOTAL:
            raise engine.error(f"returned logprobs of {len(draws)} tokens whose probabilities add up to {total:.2f}")
    if _untempered(cool, warm):
        raise engine.error("returned logprobs without the temperature: not those of the distribution it samples from")


async def _draws(
    engine: CheckedEngine, probe_ids: Sequence[int], temperature: float, num: int = _NUM_DRAWS
) -> dict[int, float]:
    """The logprob of each token that was sampled after the same prompt, each with a seed of its own."""
    requests = [
        GenerateRequest(
            prompt_ids=np.array(probe_ids[: engine.context_length - 1], dtype=np.int32),
            max_new_tokens=1,
            temperature=temperature,
            stop_ids=frozenset(),
            seed=seed,
        )
        for seed in range(num)
    ]
    found: dict[int, float] = {}
    for drawn in await asyncio.gather(*map(engine.generate, requests)):
        assert isinstance(drawn, Generation), "the prompt was cut to fit"
        token_id, logprob = int(drawn.token_ids[0]), float(drawn.logprobs[0])
        if abs(found.setdefault(token_id, logprob) - logprob) > _TOLERANCE:
            raise engine.error(
                f"returned the logprobs {found[token_id]:.3f} and {logprob:.3f} for the token {token_id} after the "
                f"same prompt with temperature {temperature:g}"
            )
    return found


def _untempered(cool: Mapping[int, float], warm: Mapping[int, float]) -> bool:
    """Whether the tokens that were sampled with both temperatures have the same logprob under both."""
    both = [token_id for token_id in cool.keys() & warm.keys() if warm[token_id] < _CERTAIN]
    return bool(both) and all(abs(cool[token_id] - warm[token_id]) < 1e-3 for token_id in both)


@contextmanager
def _naming(method: str) -> Generator[None]:
    """Turn an exception of the user's class into an error that names its method."""
    try:
        yield
    except DockyardError:
        raise
    except Exception as error:  # the class may raise anything
        raise EngineError(
            f"`{method}` failed: {type(error).__name__}: {error}", hint="`--debug` shows where"
        ) from error
