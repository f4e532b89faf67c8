"""The Chat Completions dialect, without a server."""

import json
from typing import Any

import numpy as np
import pytest

from dockyard.gateway.chat import Chat, ChatCall
from dockyard.gateway.forest import Message
from dockyard.gateway.sessions import RefusedError, Reply
from dockyard.types import Finish, Turn

CHAT = Chat("policy", lambda token_id: f"<{token_id}>")
USER = {"role": "user", "content": "hi"}
REPLY = Reply(
    number=0,
    text="hello",
    turn=Turn(
        prompt_ids=np.array([1, 2, 3], np.int32),
        sampled_ids=np.array([4, 5], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        versions=np.array([0, 0], np.int32),
        finish=Finish.LENGTH,
    ),
)


def parse(*messages: dict[str, Any], **fields: Any) -> ChatCall:
    return CHAT.parse({"model": "any", "messages": list(messages), **fields})


def events(call: ChatCall) -> list[Any]:
    lines = call.events(REPLY).decode().split("\n\n")
    assert lines.pop() == ""
    data = [line.removeprefix("data: ") for line in lines]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


def refusal(**body: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        CHAT.parse(body)
    assert caught.value.status == 400
    return caught.value.message


def test_parts_are_flattened_to_text():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": {}}]
    assert parse({"role": "user", "content": parts}).messages == (Message("user", "one\ntwo"),)


def test_developer_is_system_and_opening_system_texts_are_one():
    opening = [{"role": "developer", "content": "a"}, {"role": "system", "content": "b"}]
    assert parse(*opening, USER).messages == (Message("system", "a\n\nb"), Message("user", "hi"))


def test_a_later_system_message_is_a_reminder_from_the_user():
    later = parse(USER, {"role": "system", "content": "mind the time"}).messages[1]
    assert later == Message("user", "<system-reminder>\nmind the time\n</system-reminder>")


def test_an_assistant_may_have_said_nothing():
    assert parse(USER, {"role": "assistant", "content": None}, USER).messages[1] == Message("assistant", "")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, None), ({"max_tokens": 5}, 5), ({"max_completion_tokens": 6}, 6), ({"max_tokens": None}, None)],
)
def test_the_agents_limit_is_read_under_either_name(fields: dict[str, Any], expected: int | None):
    assert parse(USER, **fields).max_tokens == expected


def test_what_an_agent_sends_beyond_that_is_ignored():
    call = parse(USER, temperature=0, top_p=0.1, stop=["x"], seed=3, tools=[], n=1, metadata={"a": 1})
    assert call.messages == (Message("user", "hi"),)


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
        ({"messages": [USER], "tools": [{"type": "function"}]}, "`tools` is not served yet"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "`messages.1` belongs to a tool call"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "`messages.1` belongs to a tool call"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_place(body: dict[str, Any], said: str):
    assert said in refusal(**body)


def test_a_body_that_is_no_object_is_refused():
    with pytest.raises(RefusedError) as caught:
        CHAT.parse([1])
    assert caught.value.status == 400


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
