"""Agents that imitate qwen-code, with synthetic text of the size of its prompts."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MODEL = "qwen3"
SYSTEM_CHARS, NUM_TOOLS, USER_WORDS, RESULT_WORDS = 27_000, 14, 1360, 250
WORDS = (
    "file path read the command when user must never before after change output test error with each line search "
    "result directory always check value number of a in and is to run it string pattern match tool only first not "
    "code function module import return absolute relative content project build that should be use this for from "
    "available required optional default response message context repository branch commit replace `src/app.ts` "
    'README.md (e.g. stdout/stderr) IMPORTANT: "exact" don\'t --no-verify 3-5 café'
).split()

type Json = dict[str, Any]


@dataclass
class Agent:
    """One rollout's client. Its history is kept as bytes, so that it takes little time from the server it measures."""

    number: int
    parts: list[bytes] = field(default_factory=list[bytes])
    """The messages, as they are sent."""
    num_prompt: int = 0
    """Tokens of the last prompt."""

    def __post_init__(self) -> None:
        rng = random.Random(-1)  # the same system text and tools for all
        system = {"role": "system", "content": _prose(rng, SYSTEM_CHARS)[:SYSTEM_CHARS]}
        tools = [_tool(rng, number) for number in range(NUM_TOOLS)]
        self._rng = random.Random(self.number)
        texts = _prose(self._rng, USER_WORDS), f"Task {self.number}."
        self.parts = [dump(system), dump({"role": "user", "content": [_part(text) for text in texts]})]
        rest = {"tools": tools, "max_tokens": 32000, "stream": True, "stream_options": {"include_usage": True}}
        self._tail = b"]," + dump(rest)[1:]

    def body(self) -> bytes:
        return b'{"model":"%s","messages":[' % MODEL.encode() + b",".join(self.parts) + self._tail

    def take(self, answer: bytes) -> None:
        """Read the policy's reply, and add a result of its tool call."""
        events = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: {")]
        chunks = list(map(json.loads, events))
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        call = _tool_call([call for delta in deltas for call in delta.get("tool_calls") or ()])
        self.num_prompt = next(chunk["usage"]["prompt_tokens"] for chunk in chunks if chunk.get("usage"))
        echo = {"role": "assistant", "content": _said(deltas, "content") or None, "tool_calls": [call]}
        echo["reasoning_content"] = _said(deltas, "reasoning_content").strip()
        result = {"role": "tool", "tool_call_id": call["id"], "content": [_part(_prose(self._rng, RESULT_WORDS))]}
        self.parts += [dump(echo), dump(result)]


def dump(value: object) -> bytes:
    """Serialize to JSON as JavaScript does."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _said(deltas: Sequence[Json], what: str) -> str:
    return "".join(delta.get(what) or "" for delta in deltas)


def _tool_call(deltas: Sequence[Json]) -> Json:
    """Return the tool call of a stream, with its arguments parsed and serialized again."""
    name = next(delta["function"]["name"] for delta in deltas if delta["function"].get("name"))
    arguments = json.loads("".join(delta["function"].get("arguments") or "" for delta in deltas))
    rewritten = dump({key: _number(value) for key, value in arguments.items()}).decode()
    call_id = next(delta["id"] for delta in deltas if delta.get("id"))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": rewritten}}


def _number(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _part(text: str) -> Json:
    return {"type": "text", "text": text}


def _tool(rng: random.Random, number: int) -> Json:
    names, kinds = (f"{rng.choice(WORDS)}_{at}" for at in range(5)), ["string", "number", "boolean"]
    properties = {name: {"description": _prose(rng, 35), "type": rng.choice(kinds)} for name in names}
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:2]}
    function = {"name": f"tool_{number}", "description": _prose(rng, 190), "parameters": parameters}
    return {"type": "function", "function": function}


def _prose(rng: random.Random, num_words: int) -> str:
    """Return synthetic sentences."""
    words = rng.choices(WORDS, k=num_words)
    ends = [". " if at % 11 == 10 else ".\n- " if at % 29 == 28 else " " for at in range(num_words)]
    return "".join(word + end for word, end in zip(words, ends, strict=True)).strip()
