"""What the tests of conversion share: trajectories and histories made up, and a segment as it reads."""

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st
from plain_jinja import Plain

from dockyard.convert.conversation import Conversation
from dockyard.convert.tokenize import segments_of
from dockyard.gateway.render.renderer import Renderer
from dockyard.types import ASSISTANT, Message, Segment, ToolCall

type Json = dict[str, Any]


def user(text: str, **more: Any) -> Json:
    return {"source": "user", "message": text, **more}


def agent(text: str = "", *calls: Json, results: list[Json] | None = None, **more: Any) -> Json:
    step: Json = {"source": "agent", "message": text, **more}
    if calls:
        step["tool_calls"] = list(calls)
    if results is not None:
        step["observation"] = {"results": results}
    return step


def trajectory(*steps: Json, name: str = "some-agent", version: str = "1.8", **more: Any) -> Json:
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]
    agent = {"name": name, "version": "1", "model_name": "org/model", **more.pop("agent", {})}
    return {"schema_version": f"ATIF-v{version}", "session_id": "s", "agent": agent, "steps": numbered, **more}


def ids(prompt: list[int], sampled: list[int], logprobs: list[float] | None = None) -> Json:
    return {"metrics": {"prompt_token_ids": prompt, "completion_token_ids": sampled, "logprobs": logprobs}}


def said(text: str = "", thought: str = "", *calls: ToolCall) -> Message:
    return Message(ASSISTANT, text, thought, calls)


words = st.text(st.sampled_from("ab cé漢🙂\n\t'\"{}\\/.:-"), max_size=20)
"""What every tokenizer of the tests can write: SmolLM2's drops rare letters."""
arguments = st.dictionaries(st.sampled_from(["command", "path"]), words | st.integers() | st.booleans(), max_size=2)


@st.composite
def turns(draw: st.DrawFn, *, thoughts: bool) -> tuple[Message, ...]:
    """A history of requests, replies, calls and results."""
    messages = [Message("system", f"system {draw(words)}")] if draw(st.booleans()) else []
    for number in range(draw(st.integers(1, 4))):
        thought = f"hm {draw(words)}" if thoughts and draw(st.booleans()) else ""
        messages.append(Message("user", f"user {draw(words)}"))
        if draw(st.booleans()):
            call = ToolCall(f"call_{number}", "bash", draw(arguments))
            messages.append(said("", thought, call))
            messages.append(Message("tool", f"result {draw(words)}", call_id=call.id))
            thought = ""
        messages.append(said(f"said {draw(words)}.", thought))
    return tuple(messages)


def check_history(conversation: Conversation, of: Renderer, plain: Plain, stop: str) -> None:
    """One segment, which is the whole history; and each marked run is what one more message adds to a prompt."""
    messages, tools = conversation.messages, conversation.tools
    [segment] = segments_of(conversation, of)
    text = "".join(part for _, part in runs(segment, of))
    assert text == until(plain(messages, tools, False), stop)
    replies = [
        until(plain(messages[: place + 1], tools, False), stop)[len(plain(messages[:place], tools, True)) :]
        for place in conversation.replies
    ]
    assert [part for sampled, part in runs(segment, of) if sampled] == replies


def runs(segment: Segment, of: Renderer) -> list[tuple[bool, str]]:
    """The messages to and from the model, in order."""
    edges = [0, *(np.flatnonzero(np.diff(segment.sampled)) + 1).tolist(), len(segment.sampled)]
    return [(bool(segment.sampled[start]), of.text(segment.token_ids[start:end])) for start, end in pairwise(edges)]


def until(text: str, stop: str) -> str:
    return text[: text.rindex(stop) + len(stop)]
