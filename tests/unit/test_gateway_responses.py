"""The OpenAI Responses dialect, without a server; its answers are read by OpenAI's own types."""

import json
from typing import Any

import pytest
from dialect_data import LOOK, READ, SERVED, json_values, named_events, outcome, reply, said, spoiled
from hypothesis import given
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from dockyard.gateway.dialects.responses import ResponsesDialect, ResponsesRequest
from dockyard.gateway.protocol import OVERFLOW, RefusedError
from dockyard.types import Finish, Message, ToolCall

RESPONSES = ResponsesDialect(SERVED)
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
SPAWN = ToolCall("call_3", "agents.spawn", {"message": "count"})
PATCH = ToolCall("call_4", "patch", {"input": "*** Begin"})
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "bash", "description": "runs", "parameters": {"type": "object"}, "strict": False},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
    {
        "type": "custom",
        "name": "patch",
        "description": "edits",
        "format": {"type": "grammar", "definition": "start: X"},
    },
    {"type": "web_search"},
    {"type": "local_shell"},
]


def parse(*items: dict[str, Any], **fields: Any) -> ResponsesRequest:
    return RESPONSES.parse({"model": "any", "input": list(items), **fields})


def parsed(*items: dict[str, Any], **fields: Any) -> tuple[Message, ...]:
    return parse(*items, **fields).prompt.messages


def called(call_id: str, name: str, arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **fields}


def output(call_id: str, content: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": content}


def thought(words: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": words}]}


def spoken(words: str, role: str = "assistant") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "output_text", "text": words}]}


FULL: dict[str, Any] = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        USER,
        thought("hm"),
        spoken("ok"),
        called("call_1", "bash", '{"command": "ls"}'),
        called("call_3", "spawn", namespace="agents"),
        {"type": "custom_tool_call", "call_id": "call_4", "name": "patch", "input": "*** Begin"},
        output("call_1", "a"),
        output("call_3", [{"type": "input_text", "text": "b"}]),
        {"type": "custom_tool_call_output", "call_id": "call_4", "output": "c"},
    ],
    "tools": TOOLS,
    "max_output_tokens": 100,
    "text": {"format": {"type": "json_schema"}},
    "stream": True,
}


def test_a_whole_request_becomes_canonical_messages():
    call = RESPONSES.parse(FULL)
    calls = (ToolCall("call_1", "bash", {"command": "ls"}), ToolCall("call_3", "agents.spawn", {}), PATCH)
    assert call.prompt.messages == (
        Message("system", "be brief\n\nrules"),
        Message("user", "hi"),
        Message("assistant", "ok", "hm", calls),
        Message("tool", "a", call_id="call_1"),
        Message("tool", "b", call_id="call_3"),
        Message("tool", "c", call_id="call_4"),
    )
    assert (call.max_tokens, call.stream) == (100, True)


def test_tools_are_functions_for_the_policy_and_the_providers_are_removed():
    bash, spawn, patch = [tool["function"] for tool in parse(USER, tools=TOOLS).prompt.tools]
    assert bash == {"name": "bash", "description": "runs", "parameters": {"type": "object"}}
    assert spawn["name"] == "agents.spawn"
    assert (patch["name"], patch["description"]) == ("patch", "edits\n\nstart: X")
    assert patch["parameters"]["required"] == ["input"]


def test_a_text_alone_is_the_users_and_a_message_may_leave_out_its_type():
    hi = (Message("user", "hi"),)
    assert RESPONSES.parse({"input": "hi"}).prompt.messages == hi
    assert parsed({"role": "user", "content": "hi"}) == parsed(USER) == hi


def test_items_of_one_turn_are_one_message_and_those_of_the_next_are_not():
    items = [called("1", "bash"), thought("b"), spoken("c"), spoken("d"), called("2", "bash")]
    turns = [(turn.reasoning, turn.text, [call.id for call in turn.calls]) for turn in parsed(USER, *items)[1:]]
    assert turns == [("", "", ["1"]), ("b", "c", []), ("", "d", ["2"])]


def test_thinking_alone_is_a_turn_and_a_summary_is_thinking():
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}], "encrypted_content": "x"}
    assert parsed(USER, summary, USER)[1] == Message("assistant", "", "in short")


def test_a_picture_in_an_output_is_named():
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:"}]
    assert parsed(USER, output("1", parts))[1] == Message("tool", "see\n[image]", call_id="1")


def test_arguments_that_are_no_object_are_kept_as_text():
    [call] = parsed(USER, called("1", "bash", "{bad"))[1].calls
    assert "{bad" in call.arguments.values()


def test_a_structured_answer_without_tools_is_a_side_call():
    structured = {"format": {"type": "json_schema", "name": "n", "schema": {}}}
    assert parse(USER, text=structured).prompt.auxiliary
    assert not parse(USER, text=structured, tools=TOOLS).prompt.auxiliary
    assert not parse(USER, text={"format": {"type": "text"}, "verbosity": "low"}).prompt.auxiliary


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ([1], "not a JSON object"),
        ({}, "`input`"),
        ({"input": []}, "`input`"),
        ({"input": [3]}, "`input.0`"),
        ({"input": [{"role": "tool", "content": "x"}]}, "`input.0.message.role`"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "`input.0.message.content.0.type`"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": ""}]}, "`input.0.function_call.call_id`"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "`tools.0.name`"),
        (
            {"input": "hi", "tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]},
            "`tools.0.tools.0.name`",
        ),
        ({"input": "hi", "max_output_tokens": 0}, "`max_output_tokens`"),
        ({"input": "hi", "previous_response_id": "resp_1"}, "send all of it as `input`"),
        ({"input": "hi", "conversation": "conv_1"}, "send all of it as `input`"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_place(body: object, place: str):
    with pytest.raises(RefusedError) as caught:
        RESPONSES.parse(body)
    assert caught.value.status == 400
    assert place in caught.value.message


@given(spoiled(FULL) | json_values)
def test_a_spoiled_body_is_refused_or_understood(body: Any):
    result = outcome(RESPONSES, body)
    if isinstance(result, RefusedError):
        assert result.status == 400
        assert "`" in result.message or "not a JSON object" in result.message
        assert RESPONSES.error(result)["error"]["type"] == "invalid_request_error"
    else:
        assert {message.role for message in result.prompt.messages} <= {"system", "user", "assistant", "tool"}
        answer = reply("x", "", LOOK, SPAWN, PATCH)
        assert named_events(result.begin() + result.events(answer))[-1]["type"] == "response.completed"


def test_an_answer_is_a_response_as_openai_types_it():
    response = Response.model_validate(parse(USER, tools=TOOLS).body(reply("hello", "hm", LOOK, SPAWN, PATCH)))
    assert (response.status, response.model, response.output_text) == ("completed", "policy", "hello")
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "custom_tool_call",
    ]
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (3, 2, 5)


def test_calls_are_in_the_agents_words():
    items = parse(USER, tools=TOOLS).body(reply("", "", LOOK, SPAWN, PATCH))["output"]
    bash, spawn, patch = [{name: item.get(name) for name in ("call_id", "name", "namespace")} for item in items]
    assert bash == {"call_id": "call_1", "name": "bash", "namespace": None}
    assert spawn == {"call_id": "call_3", "name": "spawn", "namespace": "agents"}
    assert patch == {"call_id": "call_4", "name": "patch", "namespace": None}
    assert json.loads(items[0]["arguments"]) == LOOK.arguments
    assert items[2]["input"] == "*** Begin"


def test_a_text_tool_called_with_other_arguments_still_gets_text():
    wrong = ToolCall("1", "patch", {"diff": "x"})
    [item] = parse(USER, tools=TOOLS).body(reply("", "", wrong))["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", '{"diff": "x"}')


def test_a_tool_that_nobody_offered_is_called_by_its_name():
    [item] = parse(USER).body(reply("", "", SPAWN))["output"]
    assert (item["type"], item["name"]) == ("function_call", "agents.spawn")


def test_a_cut_answer_is_completed_and_says_that_it_was_cut():
    response = Response.model_validate(parse(USER).body(reply("x", finish=Finish.LENGTH)))
    assert response.status == "completed"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_an_empty_answer_has_an_empty_message():
    assert Response.model_validate(parse(USER).body(reply())).output[0].type == "message"


def test_token_ids_and_logprobs_come_when_asked_for():
    call = parse(USER, return_token_ids=True, logprobs=True)
    tokens = {"prompt_token_ids": [1, 2, 3], "token_ids": [4, 5], "logprobs": [-0.5, -0.25]}
    assert call.body(reply("x")).items() >= tokens.items()
    assert named_events(call.events(reply("x")))[-1]["response"].items() >= tokens.items()


@pytest.mark.parametrize("answer", [reply("hello", "hm", LOOK, READ, SPAWN, PATCH), reply(), reply("", "hm")])
def test_a_stream_is_made_of_events_as_openai_types_them(answer: Any):
    call = parse(USER, tools=TOOLS, stream=True)
    stream = named_events(call.begin() + call.keep_alive() + call.keep_alive() + call.events(answer))
    events = [STREAM_EVENT.validate_python(event) for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == ["response.created", *["response.in_progress"] * 2]
    assert len({event.response.id for event in (*events[:3], events[-1])}) == 1
    finished = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    assert stream[-1]["response"]["output"] == finished


def test_the_parts_of_a_stream_put_together_to_its_items():
    call = parse(USER, tools=TOOLS, stream=True)
    texts: dict[str, str] = {}
    finished: dict[str, dict[str, Any]] = {}
    for event in named_events(call.begin() + call.events(reply("hello", "hm", LOOK, PATCH))):
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        if event["type"] == "response.output_item.added":
            assert not event["item"].get("content")
            assert not event["item"].get("arguments")
        if event["type"] == "response.output_item.done":
            finished[event["item"]["id"]] = event["item"]
    assert {finished[item_id]["type"]: text for item_id, text in texts.items()} == {
        "message": "hello",
        "function_call": LOOK.arguments_json(),
        "custom_tool_call": "*** Begin",
    }


def test_an_error_is_openais_and_within_a_stream_a_failed_response():
    refused = RefusedError(400, OVERFLOW, "too long")
    assert RESPONSES.error(refused)["error"]["code"] == OVERFLOW
    [failed] = named_events(parse(USER).error_event(refused))
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": OVERFLOW, "message": "too long"}


@given(said)
def test_what_was_said_comes_back_as_it_was(message: Message):
    """codex sends its items back as it got them."""
    call = parse(USER, tools=TOOLS)
    items = call.body(reply(message.text, message.reasoning, *message.calls))["output"]
    assert parsed(USER, *json.loads(json.dumps(items)))[1:] == (message,)


def test_calls_in_the_agents_words_come_back_in_the_policys():
    call = parse(USER, tools=TOOLS)
    items = call.body(reply("", "", LOOK, SPAWN, PATCH))["output"]
    assert parsed(USER, *items)[1].calls == (LOOK, SPAWN, PATCH)
