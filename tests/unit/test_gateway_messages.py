"""The Anthropic Messages dialect, without a server."""

import json
from typing import Any

import pytest
from dialect_data import LOOK, READ, SERVED, json_values, named_events, outcome, reply, said, spoiled
from hypothesis import given
from hypothesis import strategies as st

from dockyard.gateway.dialects.messages import MessagesDialect, MessagesRequest
from dockyard.gateway.protocol import OVERFLOW, RefusedError
from dockyard.types import Finish, Message, ToolCall

MESSAGES = MessagesDialect(SERVED)
USER = {"role": "user", "content": "hi"}


def parse(*messages: dict[str, Any], **fields: Any) -> MessagesRequest:
    return MESSAGES.parse({"model": "any", "max_tokens": 32000, "messages": list(messages), **fields})


def parsed(*messages: dict[str, Any], **fields: Any) -> tuple[Message, ...]:
    return parse(*messages, **fields).prompt.messages


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def refusal(body: object) -> str:
    with pytest.raises(RefusedError) as caught:
        MESSAGES.parse(body)
    assert caught.value.status == 400
    return caught.value.message


FULL: dict[str, Any] = {
    "model": "m",
    "max_tokens": 100,
    "system": [text("x-anthropic-billing-header: v1"), text("be brief", cache_control={"type": "ephemeral"})],
    "tools": [{"name": "bash", "description": "runs", "input_schema": {"type": "object"}}],
    "messages": [
        {"role": "user", "content": [text("hi")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                text("ok"),
                {"type": "tool_use", "id": "call_1", "name": "bash", "input": {"command": "ls"}},
            ],
        },
        {"role": "user", "content": [result("call_1", [text("a")]), text("go on")]},
    ],
    "output_config": {"format": {"type": "json_schema"}},
    "stream": True,
}


def test_a_whole_request_becomes_canonical_messages():
    call = MESSAGES.parse(FULL)
    assert call.prompt.messages == (
        Message("system", "be brief"),
        Message("user", "hi"),
        Message("assistant", "ok", "hm", (ToolCall("call_1", "bash", {"command": "ls"}),)),
        Message("tool", "a", call_id="call_1"),
        Message("user", "go on"),
    )
    [tool] = call.prompt.tools
    assert tool["function"] == {"name": "bash", "description": "runs", "parameters": {"type": "object"}}
    assert (call.max_tokens, call.stream) == (100, True)


def test_a_string_and_a_list_of_blocks_are_the_same_text():
    assert parsed(USER, system="s") == parsed({"role": "user", "content": [text("hi")]}, system=[text("s")])


def test_the_billing_block_is_dropped_only_at_the_head():
    billing = "x-anthropic-billing-header: cc_version=1"
    assert parsed(USER, system=[text(billing), text("s")])[0] == Message("system", "s")
    assert parsed(USER, system=[text(billing)]) == (Message("user", "hi"),)
    assert billing in parsed(USER, system=[text("s"), text(billing)])[0].text


def test_a_system_message_in_the_history_is_a_reminder_from_the_user():
    later = parsed(USER, {"role": "system", "content": "mind the time"})[1]
    assert later == Message("user", "<system-reminder>\nmind the time\n</system-reminder>")


def test_results_and_texts_of_one_message_keep_their_order():
    blocks = [text("a"), text("b"), result("1", "x"), result("2", [text("y"), text("z")]), text("c")]
    assert parsed({"role": "user", "content": blocks}) == (
        Message("user", "a\nb"),
        Message("tool", "x", call_id="1"),
        Message("tool", "y\nz", call_id="2"),
        Message("user", "c"),
    )


def test_a_picture_in_a_result_is_named_and_a_result_may_be_empty():
    blocks = [result("1", [text("x"), {"type": "image", "source": {}}]), {"type": "tool_result", "tool_use_id": "2"}]
    assert [message.text for message in parsed({"role": "user", "content": blocks})] == ["x\n[image]", ""]


def test_the_text_of_a_failed_result_is_kept_as_it_is():
    failed = {**result("1", "no such file"), "is_error": True}
    assert parsed({"role": "user", "content": [failed]}) == (Message("tool", "no such file", call_id="1"),)


def test_hidden_thinking_is_nothing_and_an_assistant_may_have_said_nothing():
    hidden = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    assert parsed(USER, hidden, {"role": "assistant", "content": []})[1:] == (Message("assistant", ""),) * 2


def test_tools_that_the_provider_would_run_are_removed():
    own = {"type": "custom", "name": "bash"}
    tools = parse(USER, tools=[{"type": "web_search_20250305", "name": "web_search"}, own]).prompt.tools
    assert [tool["function"]["name"] for tool in tools] == ["bash"]


def test_a_tool_loaded_late_is_defined_where_it_was_loaded():
    late = {"name": "cron", "description": "d", "input_schema": {"type": "object"}, "defer_loading": True}
    found = {"role": "user", "content": [result("1", [{"type": "tool_reference", "tool_name": "cron"}])]}
    prompt = parse(USER, found, tools=[{"name": "bash"}, late]).prompt
    assert [tool["function"]["name"] for tool in prompt.tools] == ["bash"]
    assert json.loads(prompt.messages[-1].text)["function"]["name"] == "cron"


def test_a_structured_answer_without_tools_is_a_side_call():
    structured = {"effort": "high", "format": {"type": "json_schema", "schema": {}}}
    assert parse(USER, output_config=structured).prompt.auxiliary
    assert not parse(USER, output_config=structured, tools=[{"name": "bash"}]).prompt.auxiliary
    assert not parse(USER, output_config={"effort": "high"}).prompt.auxiliary


def test_tokens_can_be_counted_without_a_limit():
    assert MESSAGES.parse({"model": "m", "messages": [USER]}).max_tokens is None


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ([1], "not a JSON object"),
        ({}, "`messages`"),
        ({"messages": []}, "`messages`"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "`messages.0`"),
        ({"messages": [{"role": "user"}]}, "`messages.0.user.content`"),
        ({"messages": [{"role": "user", "content": []}]}, "`messages.0.user.content`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "`messages.0.user.content.0.text.text`"),
        ({"messages": [USER], "system": 3}, "`system`"),
        ({"messages": [USER], "max_tokens": 0}, "`max_tokens`"),
        ({"messages": [USER], "tools": [{"description": "x"}]}, "`tools.0.name`"),
        ({"messages": [USER], "tools": [{"name": "x", "input_schema": []}]}, "`tools.0.input_schema`"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_place(body: object, place: str):
    assert place in refusal(body)


@given(spoiled(FULL) | json_values)
def test_a_spoiled_body_is_refused_or_understood(body: Any):
    result = outcome(MESSAGES, body)
    if isinstance(result, RefusedError):
        assert result.status == 400
        assert "`" in result.message or "not a JSON object" in result.message
        assert MESSAGES.error(result)["error"]["type"] == "invalid_request_error"
    else:
        assert {message.role for message in result.prompt.messages} <= {"system", "user", "assistant", "tool"}
        assert named_events(result.begin() + result.events(reply("x")))[-1]["type"] == "message_stop"


def test_an_answer_has_the_shape_clients_expect():
    body = parse(USER).body(reply("hello", "hm", LOOK))
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "none"},
            {"type": "text", "text": "hello"},
            {"type": "tool_use", "id": "call_1", "name": "bash", "input": LOOK.arguments},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "output_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (reply("x"), "end_turn"),
        (reply("", "", LOOK), "tool_use"),
        (reply("x", finish=Finish.LENGTH), "max_tokens"),
    ],
)
def test_the_reason_it_stopped_has_anthropics_name(answer: Any, reason: str):
    assert parse(USER).body(answer)["stop_reason"] == reason


def test_an_empty_answer_has_an_empty_text():
    assert parse(USER).body(reply())["content"] == [text("")]


def test_token_ids_and_logprobs_come_when_asked_for():
    call = parse(USER, return_token_ids=True, logprobs=True)
    tokens = {"prompt_token_ids": [1, 2, 3], "token_ids": [4, 5], "logprobs": [-0.5, -0.25]}
    assert call.body(reply("x")).items() >= tokens.items()
    assert named_events(call.events(reply("x")))[-1] == {"type": "message_stop", **tokens}


def rebuilt(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from a stream."""
    message: dict[str, Any] = {}
    arguments: dict[int, str] = {}
    for event in events:
        match event:
            case {"type": "message_start"}:
                message = event["message"]
            case {"type": "content_block_start"}:
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": more}}:
                arguments[event["index"]] = arguments.get(event["index"], "") + more
            case {"type": "content_block_delta", "delta": {"type": kind, **more}}:
                name = kind.removesuffix("_delta")
                message["content"][event["index"]][name] += more[name]
            case {"type": "message_delta"}:
                message = {**message, **event["delta"], "usage": event["usage"]}
            case _:
                assert event["type"] in ("ping", "content_block_stop", "message_stop")
    for index, written in arguments.items():
        message["content"][index]["input"] = json.loads(written)
    return message


@pytest.mark.parametrize("answer", [reply("hello", "hm", LOOK, READ), reply(), reply("", "hm"), reply("x")])
def test_a_stream_puts_together_to_the_whole_answer(answer: Any):
    call = parse(USER, stream=True)
    stream = named_events(call.begin() + call.keep_alive() + call.events(answer))
    assert rebuilt(stream) == call.body(answer)
    assert [event["type"] for event in stream[:2]] == ["message_start", "ping"]
    assert stream[-1] == {"type": "message_stop"}


def test_the_prompt_is_counted_at_the_start_when_the_answer_is_there():
    call = parse(USER, stream=True)
    for answer, tokens in ((None, 0), (reply("x"), 3)):
        [start] = named_events(call.begin(answer))
        assert start["message"]["usage"]["input_tokens"] == tokens


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (500, "api_error"),
        (503, "api_error"),
    ],
)
def test_an_error_has_anthropics_name(status: int, kind: str):
    refused = RefusedError(status, "any", "no")
    assert MESSAGES.error(refused) == {"type": "error", "error": {"type": kind, "message": "no"}}
    assert named_events(parse(USER).error_event(refused)) == [MESSAGES.error(refused)]


def test_overflow_is_said_in_the_words_that_make_claude_code_compact():
    error = MESSAGES.error(RefusedError(400, OVERFLOW, "9 tokens > 8 maximum"))["error"]
    assert error == {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8 maximum"}


@given(said, st.booleans())
def test_what_was_said_comes_back_as_it_was(message: Message, as_string: bool):
    """claude-code reorders keys, adds marks of its own, and sends a lone text now and then as a string."""
    call = parse(USER)
    blocks = call.body(reply(message.text, message.reasoning, *message.calls))["content"]
    echoed: Any = [dict(reversed(block.items())) | {"cache_control": {}} for block in json.loads(json.dumps(blocks))]
    if as_string and [block["type"] for block in blocks] == ["text"]:
        echoed = blocks[0]["text"]
    assert parsed(USER, {"role": "assistant", "content": echoed})[1] == message
