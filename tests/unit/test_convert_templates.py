"""Conversations in real tokenizers and chat templates, each against plain Jinja."""

import re

import pytest
from converting import check_history, runs, turns, until
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import CALLS, real_policy
from tool_templates import BASH

from dockyard.convert.conversation import Conversation
from dockyard.convert.tokenize import segments_of
from dockyard.types import ASSISTANT, Message

pytestmark = pytest.mark.tokenizers


@pytest.mark.parametrize("name", [name for name in CALLS if name != "qwen3"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_real_templates_print_the_same(name: str, data: st.DataObject):
    policy = real_policy(name)
    messages = data.draw(turns(thoughts=False))
    stop = policy.tokenizer.decode([policy.stop_id], skip_special_tokens=False)
    conversation = Conversation(messages=messages, tools=(BASH,))
    check_history(conversation, policy.renderer, policy.plain, stop)
    [segment] = segments_of(conversation, policy.renderer)
    # Where a reply begins with a line break, plain tokenising would join it with the prompt's, which is settled.
    if not any(part.startswith("\n") for sampled, part in runs(segment, policy.renderer) if sampled):
        assert segment.token_ids.tolist() == policy.ids(until(policy.plain(messages, (BASH,), False), stop))


@settings(max_examples=25, deadline=None)
@given(turns(thoughts=True))
def test_qwen3_keeps_the_thoughts_that_its_template_would_drop(messages: tuple[Message, ...]):
    policy = real_policy("qwen3")
    [segment] = segments_of(Conversation(messages=messages, tools=(BASH,)), policy.renderer)
    parts = [part for sampled, part in runs(segment, policy.renderer) if sampled]
    for message, part in zip([m for m in messages if m.role == ASSISTANT], parts, strict=True):
        thought = message.reasoning.strip("\n")
        assert part.startswith(f"<think>\n{thought}\n</think>\n\n") == bool(message.reasoning)
        assert ("<think>" in part) == bool(message.reasoning)
        assert part.endswith("<|im_end|>")
        assert re.sub(r"\s", "", message.text) in re.sub(r"\s", "", part)
