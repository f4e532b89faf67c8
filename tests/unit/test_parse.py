"""What an agent is given of a sampled reply: thoughts, text and calls that it can run, and nothing else."""

import json
from typing import Any

import numpy as np
import pytest
from gateway_fakes import tiny_renderer, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tool_templates import BASH, HERMES, XML, renderer_of

from dockyard.types import Message

EMPTY = np.empty(0, np.int32)


def ids_of(text: str) -> np.ndarray:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<tool_call>", "</tool_call>")])
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def plain_ids(text: str) -> np.ndarray:
    """Of a tokenizer without tokens for calls."""
    return np.array(tiny_tokenizer().encode(text, add_special_tokens=False).ids, np.int32)


def read(text: str, template: str = HERMES, *, tools: tuple[Any, ...] = (BASH,)) -> Message:
    return renderer_of(template).message(ids_of(text), EMPTY, tools)


def called(message: Message) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in message.calls]


def test_templates_show_how_they_write_calls():
    assert renderer_of(HERMES).rendering.tool_calls == "hermes"
    assert renderer_of(XML).rendering.tool_calls == "xml"
    assert tiny_renderer().rendering.tool_calls == "preamble"


def test_thoughts_text_and_calls_are_told_apart():
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    message = read(f"<think>\nhm\n</think>\n\nI look.\n{call}<|im_end|>")
    assert (message.reasoning.strip(), message.text.strip()) == ("hm", "I look.")
    assert called(message) == [("bash", {"command": "ls"})]


def test_parallel_calls_keep_their_order_and_get_ids_of_their_own():
    one = '<tool_call>{"name": "bash", "arguments": {"command": "a"}}</tool_call>'
    message = read(one + "\n" + one.replace('"a"', '"b"'))
    assert called(message) == [("bash", {"command": "a"}), ("bash", {"command": "b"})]
    assert len({call.id for call in message.calls}) == 2
    assert all(len(call.id.removeprefix("call_")) == 32 for call in message.calls)  # 128 bits


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "bash", "arguments": {"command": "ls"}',
        '{"name": "bash", "arguments": {"command": "ls}}',
        '{"name": 5, "arguments": {}}',
        '{"arguments": {"command": "ls"}}',
        '{"name": "bash", "arguments": [1]}',
        '{"name": "bash", "arguments": {"limit": NaN}}',
        '["bash"]',
        "",
        "[" * 2000,
    ],
)
@pytest.mark.parametrize("close", ["</tool_call>", ""])
def test_a_call_that_cannot_be_run_is_text_to_the_agent(body: str, close: str):
    message = read(f"I try.<tool_call>{body}{close}")
    assert message.calls == ()
    assert message.text.startswith("I try.")
    assert f"<tool_call>{body}" in message.text


def test_a_good_call_beside_a_bad_one_is_served():
    message = read('<tool_call>{"name"</tool_call><tool_call>{"name": "bash", "arguments": {}}</tool_call>')
    assert called(message) == [("bash", {})]
    assert message.text == '<tool_call>{"name"</tool_call>'


def test_arguments_written_as_a_string_are_read():
    message = read('<tool_call>{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>')
    assert called(message) == [("bash", {"command": "ls"})]


def test_half_a_character_in_an_argument_becomes_a_question_mark():
    [(_, arguments)] = called(read('<tool_call>{"name": "bash", "arguments": {"command": "a\\ud800b"}}</tool_call>'))
    assert arguments == {"command": "a?b"}


def test_typed_parameters_are_read_by_the_tools_schema():
    text = "<tool_call>\n<function=bash>\n<parameter=command>\n12\n</parameter>\n<parameter=limit>\n12\n</parameter>\n"
    assert called(read(text + "</function>\n</tool_call>", XML)) == [("bash", {"command": "12", "limit": 12})]


def test_a_parameter_of_another_type_than_its_schemas_is_passed_on_as_text():
    text = "<tool_call>\n<function=bash>\n<parameter=limit>\nmany\n</parameter>\n</function>\n</tool_call>"
    assert called(read(text, XML)) == [("bash", {"limit": "many"})]


def test_calls_are_text_where_the_template_knows_no_tools():
    said = 'Well.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call> <tool_call>{</tool_call>'
    message = tiny_renderer().message(plain_ids(said), EMPTY, (BASH,))
    assert called(message) == [("bash", {"command": "ls"})]
    assert message.text == "Well.\n <tool_call>{</tool_call>"


def test_without_tools_nothing_is_a_call_in_plain_text():
    said = '<tool_call>{"name": "bash", "arguments": {}}</tool_call>'
    message = tiny_renderer().message(plain_ids(said), EMPTY, ())
    assert (message.text, message.calls) == (said, ())


MARKS = "<tool_call> </tool_call> <think> </think> <|im_end|> <|im_start|> <function=bash> </function> <parameter=a>"
TOKENS = st.sampled_from(
    [*MARKS.split(), "</parameter>", '{"name": "bash", "arguments": {}}', '"', "\\u00e9", "\ud7ff", " "]
)


@given(st.lists(TOKENS | st.text(max_size=3), max_size=12).map("".join), st.sampled_from([HERMES, XML]))
def test_nothing_a_policy_can_sample_fails_to_be_read(text: str, template: str):
    message = read(text, template)
    assert message.role == "assistant"
    for call in message.calls:
        assert json.loads(call.arguments_json()) == call.arguments
    json.dumps([message.text, message.reasoning], ensure_ascii=False).encode()


@given(st.lists(st.integers(0, 400), max_size=20))
def test_no_ids_fail_to_be_read(ids: list[int]):
    message = renderer_of(HERMES).message(np.array(ids, np.int32), EMPTY, (BASH,))
    json.dumps([message.text, message.reasoning], ensure_ascii=False).encode()
