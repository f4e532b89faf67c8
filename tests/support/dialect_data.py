"""What the tests of the wire dialects share: answers of a policy, streams taken apart, and bodies gone wrong."""

import copy
import json
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dockyard.gateway.protocol import AdvertisedModel, Dialect, ModelReply, ModelRequest, RefusedError
from dockyard.types import ASSISTANT, Finish, Message, ToolCall, Turn

SERVED = AdvertisedModel("policy", lambda token_id: f"<{token_id}>")
LOOK = ToolCall("call_1", "bash", {"command": "ls é", "timeout": 5000.0})
READ = ToolCall("call_2", "read", {"path": "a", "lines": {"from": 1, "to": 2}})


def reply(text: str = "", reasoning: str = "", *calls: ToolCall, finish: Finish = Finish.STOP) -> ModelReply:
    turn = Turn(
        prompt_ids=np.array([1, 2, 3], np.int32),
        sampled_ids=np.array([4, 5], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        versions=np.array([0, 0], np.int32),
        finish=finish,
    )
    return ModelReply(number=0, turn=turn, message=Message(ASSISTANT, text, reasoning, calls))


def outcome(dialect: Dialect, body: Any) -> ModelRequest | RefusedError:
    """What becomes of a body; any other error is the test's failure."""
    try:
        return dialect.parse(body)
    except RefusedError as refused:
        return refused


def named_events(stream: bytes) -> list[dict[str, Any]]:
    """The data of a stream whose events say their name twice."""
    *blocks, rest = stream.decode().split("\n\n")
    assert rest == ""
    events: list[dict[str, Any]] = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(st.text(max_size=8), json_values, max_size=3)
tool_calls = st.builds(ToolCall, st.uuids().map(str), st.sampled_from(["bash", "read"]), json_objects)
said = st.builds(
    lambda text, reasoning, calls: Message(ASSISTANT, text, reasoning, tuple(calls)),
    st.text(max_size=20),
    st.text(max_size=20),
    st.lists(tool_calls, max_size=3),
)


@st.composite
def spoiled(draw: st.DrawFn, body: dict[str, Any]) -> Any:
    """The body with one or more of its values replaced by any JSON, or taken away."""
    spoilt = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(_places(spoilt)))
        if isinstance(holder, dict) and draw(st.booleans()):
            del holder[key]
        else:
            holder[key] = draw(json_values)
        if not spoilt:
            break
    return spoilt


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place inside a value, as its holder and its key."""
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    inner = [place for key in keys if isinstance(value[key], dict | list) for place in _places(value[key])]
    return [(value, key) for key in keys] + inner
