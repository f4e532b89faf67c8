"""The Chat Completions dialect, without a server; its answers are read by OpenAI's own types."""

import json
from typing import Any

import pytest
from dialect_data import LOOK, READ, SERVED, json_values, outcome, reply, said, spoiled
from hypothesis import given
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from dockyard.gateway.dialects.chat import ChatDialect, ChatRequest
from dockyard.gateway.protocol import OVERFLOW, ModelReply, ModelRequest, RefusedError
from dockyard.types import Finish, Message, ToolCall

CHAT = ChatDialect(SERVED)
USER = {"role": "user", "content": "hi"}
REPLY = reply("hello", finish=Finish.LENGTH)
BASH = {"name": "bash", "description": "runs", "parameters": {"type": "object"}}
FULL: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": "ok",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "a"},
    ],
    "tools": [{"type": "function", "function": BASH}],
    "max_tokens": 100,
    "response_format": {"type": "json_schema"},
    "stream": True,
    "stream_options": {"include_usage": True},
}


def parse(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return CHAT.parse({"model": "any", "messages": list(messages), **fields})


def parsed(*messages: dict[str, Any]) -> tuple[Message, ...]:
    return parse(*messages).prompt.messages


def events(call: ModelRequest, answer: ModelReply = REPLY) -> list[Any]:
    lines = (call.begin(answer) + call.events(answer)).decode().split("\n\n")
    assert lines.pop() == ""
    data = [line.removeprefix("data: ") for line in lines]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


def refusal(**body: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        CHAT.parse(body)
    assert caught.value.status == 400
    return caught.value.message


def test_a_whole_request_becomes_canonical_messages():
    call = CHAT.parse(FULL)
    assert call.prompt.messages == (
        Message("system", "be brief"),
        Message("user", "hi"),
        Message("assistant", "ok", "hm", (ToolCall("call_1", "bash", {"command": "ls"}),)),
        Message("tool", "a", call_id="call_1"),
    )
    assert call.prompt.tools == ({"type": "function", "function": BASH},)
    assert (call.max_tokens, call.stream) == (100, True)


def test_parts_are_flattened_to_text():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": {}}]
    assert parsed({"role": "user", "content": parts}) == (Message("user", "one\ntwo"),)


def test_developer_is_system_and_opening_system_texts_are_one():
    opening = [{"role": "developer", "content": "a"}, {"role": "system", "content": "b"}]
    assert parsed(*opening, USER) == (Message("system", "a\n\nb"), Message("user", "hi"))


def test_a_later_system_message_is_a_reminder_from_the_user():
    later = parsed(USER, {"role": "system", "content": "mind the time"})[1]
    assert later == Message("user", "<system-reminder>\nmind the time\n</system-reminder>")


def test_an_assistant_may_have_said_nothing():
    assert parsed(USER, {"role": "assistant", "content": None}, USER)[1] == Message("assistant", "")


def test_arguments_may_come_as_an_object_and_what_is_no_object_is_kept_as_text():
    functions = [{"name": "a", "arguments": {"x": 1}}, {"name": "b"}, {"name": "c", "arguments": "{bad"}]
    wire = [{"id": function["name"], "function": function} for function in functions]
    arguments = [call.arguments for call in parsed(USER, {"role": "assistant", "tool_calls": wire})[1].calls]
    assert arguments[:2] == [{"x": 1}, {}]
    assert "{bad" in arguments[2].values()


def test_a_structured_answer_without_tools_is_a_side_call():
    structured = {"type": "json_schema", "json_schema": {}}
    assert parse(USER, response_format=structured).prompt.auxiliary
    assert not parse(USER, response_format={"type": "text"}).prompt.auxiliary
    assert not parse(USER, response_format=structured, tools=FULL["tools"]).prompt.auxiliary


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, None), ({"max_tokens": 5}, 5), ({"max_completion_tokens": 6}, 6), ({"max_tokens": None}, None)],
)
def test_the_agents_limit_is_read_under_either_name(fields: dict[str, Any], expected: int | None):
    assert parse(USER, **fields).max_tokens == expected


def test_what_an_agent_sends_beyond_that_is_ignored():
    call = parse(USER, temperature=0, top_p=0.1, stop=["x"], seed=3, tools=[], n=1, metadata={"a": 1})
    assert call.prompt.messages == (Message("user", "hi"),)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "`messages`: Field required"),
        ({"messages": []}, "`messages`: List should have at least 1 item"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "`messages.0.role`"),
        ({"messages": [{"role": "user"}]}, "`messages.0.content` is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "`image_url`"),
        ({"messages": [USER], "n": 2}, "`n` is 2"),
        ({"messages": [USER], "max_tokens": 0}, "`max_tokens`"),
        ({"messages": [USER], "tools": [{"type": "custom", "custom": {}}]}, "`tools.0` has the type `custom`"),
        ({"messages": [USER], "tools": [{"function": {}}]}, "`tools.0.function.name`"),
        ({"messages": [USER], "functions": [BASH]}, "`functions` is not supported"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "`messages.1.tool_calls.0.function`"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_place(body: dict[str, Any], said: str):
    assert said in refusal(**body)


def test_a_body_that_is_no_object_is_refused():
    with pytest.raises(RefusedError) as caught:
        CHAT.parse([1])
    assert caught.value.status == 400


@given(spoiled(FULL) | json_values)
def test_a_spoiled_body_is_refused_or_understood(body: Any):
    result = outcome(CHAT, body)
    if isinstance(result, RefusedError):
        assert result.status == 400
        assert "`" in result.message or "not a JSON object" in result.message
        assert CHAT.error(result)["error"]["type"] == "invalid_request_error"
    else:
        assert {message.role for message in result.prompt.messages} <= {"system", "user", "assistant", "tool"}
        assert events(result)[-1] == "[DONE]"


def test_an_answer_has_the_shape_clients_expect():
    body = parse(USER).body(REPLY)
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello"},
                "finish_reason": "length",
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_token_ids_and_logprobs_come_when_asked_for():
    body = parse(USER, logprobs=True, return_token_ids=True).body(REPLY)
    [choice] = body["choices"]
    assert (body["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [4, 5])
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5, -0.25]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["<4>", "<5>"]


def test_calls_and_thoughts_are_read_by_openais_types():
    body = parse(USER).body(reply("hello", "hm", LOOK, READ))
    completion = ChatCompletion.model_validate(body)
    calls = completion.choices[0].message.tool_calls or []
    assert [(call.id, call.type) for call in calls] == [("call_1", "function"), ("call_2", "function")]
    assert [json.loads(call.function.arguments) for call in calls if call.type == "function"] == [
        LOOK.arguments,
        READ.arguments,
    ]
    assert (completion.choices[0].finish_reason, completion.choices[0].message.content) == ("tool_calls", "hello")
    assert body["choices"][0]["message"]["reasoning_content"] == "hm"


@pytest.mark.parametrize("answer", [reply("hello", "hm", LOOK, READ), reply("x"), reply()])
def test_openais_client_puts_a_stream_together_to_the_whole_answer(answer: ModelReply):
    call = parse(USER, stream=True, stream_options={"include_usage": True})
    state = ChatCompletionStreamState()
    for chunk in events(call, answer)[:-1]:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    built = state.get_final_completion()
    whole = ChatCompletion.model_validate(call.body(answer))
    assert (built.id, built.usage, built.choices[0].finish_reason) == (
        whole.id,
        whole.usage,
        whole.choices[0].finish_reason,
    )
    spoke, wrote = built.choices[0].message, whole.choices[0].message
    assert spoke.content == wrote.content
    assert [(call.id, call.function.name, call.function.arguments) for call in spoke.tool_calls or []] == [
        (call.id, call.function.name, call.function.arguments)
        for call in wrote.tool_calls or []
        if call.type == "function"
    ]


def test_a_stream_says_the_text_then_the_reason_then_the_usage():
    said, ended, usage, done = events(parse(USER, stream=True, stream_options={"include_usage": True}))
    assert said["choices"][0]["delta"] == {"role": "assistant", "content": "hello"}
    assert said["choices"][0]["finish_reason"] is None
    assert ended["choices"] == [{"index": 0, "delta": {}, "finish_reason": "length"}]
    assert (usage["choices"], usage["usage"]["total_tokens"], done) == ([], 5, "[DONE]")
    assert {chunk["object"] for chunk in (said, ended, usage)} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (said, ended, usage)}) == 1


def test_a_stream_carries_token_ids_with_its_text():
    said, *rest = events(parse(USER, stream=True, logprobs=True, return_token_ids=True))
    assert (said["prompt_token_ids"], said["choices"][0]["token_ids"]) == ([1, 2, 3], [4, 5])
    assert len(said["choices"][0]["logprobs"]["content"]) == 2
    assert len(rest) == 2


def test_a_keep_alive_is_a_chunk_that_says_nothing():
    line = parse(USER, stream=True).keep_alive().decode()
    assert line.endswith("\n\n")
    assert json.loads(line.removeprefix("data: "))["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]


def test_an_error_has_openais_shape_also_within_a_stream():
    refused = RefusedError(400, OVERFLOW, "too long")
    body = {
        "error": {"message": "too long", "type": "invalid_request_error", "param": None, "code": OVERFLOW},
    }
    assert CHAT.error(refused) == body
    assert json.loads(parse(USER).error_event(refused).decode().removeprefix("data: ")) == body
    assert CHAT.error(RefusedError(503, "engine", "down"))["error"]["type"] == "server_error"


@given(said)
def test_what_was_said_comes_back_as_it_was(message: Message):
    """qwen-code re-serializes arguments without spaces, and sends empty values as null."""
    wire = parse(USER).body(reply(message.text, message.reasoning, *message.calls))["choices"][0]["message"]
    for call in wire.get("tool_calls", ()):
        function = call["function"]
        function["arguments"] = json.dumps(json.loads(function["arguments"]), separators=(",", ":"))
    assert parsed(USER, wire)[1] == message
