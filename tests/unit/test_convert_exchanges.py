"""Model calls that were logged as text become conversations, each reply the model's own in exactly one."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dockyard.chat_format import exchange_json, parse_exchange
from dockyard.convert.atif import UnreadableError
from dockyard.convert.conversation import Conversation, conversations_of
from dockyard.convert.logs import read_completions
from dockyard.types import Exchange, Finish, Message, Prompt, ToolCall

type Json = dict[str, Any]

TOOL = {"type": "function", "function": {"name": "bash", "description": "", "parameters": {}}}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def said(text: str | None, *call_ids: str, **more: Any) -> Json:
    calls = [{"id": name, "type": "function", "function": {"name": "bash", "arguments": "{}"}} for name in call_ids]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {}), **more}


def result(call_id: str) -> Json:
    return {"role": "tool", "content": "seen", "tool_call_id": call_id}


def exchange(*messages: Json, reply: Json, **more: Any) -> Json:
    return {"messages": list(messages), "tools": [TOOL], "reply": reply, "finish": "stop", "delivered": True, **more}


def converted(exchanges: Sequence[Json]) -> tuple[Conversation, ...]:
    return conversations_of([parse_exchange(exchange) for exchange in exchanges])


def shown(*exchanges: Json) -> list[tuple[list[str], list[str]]]:
    """The texts of each conversation, and those that the model said in it."""
    return [
        ([message.text for message in one.messages], [one.messages[place].text for place in one.replies])
        for one in converted(exchanges)
    ]


def test_a_call_that_goes_on_from_another_is_joined_to_it():
    assert shown(
        exchange(user("go"), reply=said("one")),
        exchange(user("go"), said("one"), user("more"), reply=said("two")),
    ) == [(["go", "one", "more", "two"], ["one", "two"])]


def test_an_agent_may_echo_with_other_blanks_and_without_thoughts_and_the_words_of_the_model_count():
    first = exchange(user("go"), reply=said("one  line", reasoning_content="Hm."))
    [conversation] = converted([first, exchange(user("go"), said(" one line"), user("more"), reply=said("two"))])
    assert conversation.messages[1] == Message("assistant", "one  line", "Hm.")
    assert conversation.tools == (TOOL,)


def test_calls_are_known_by_their_ids_even_if_the_text_beside_them_is_gone():
    exchanges = [
        exchange(user("go"), reply=said("I look.", "c1")),
        exchange(user("go"), said(None, "c1"), result("c1"), reply=said("done")),
    ]
    [conversation] = converted(exchanges)
    assert conversation.messages[1] == Message("assistant", "I look.", calls=(ToolCall("c1", "bash", {}),))
    assert conversation.replies == (1, 3)
    exchanges[1]["messages"][1] = said(None, "c9")
    assert [len(one.replies) for one in converted(exchanges)] == [1, 1]


@pytest.mark.parametrize("change", ["arguments", "thoughts"])
def test_a_turn_with_other_arguments_or_thoughts_is_a_rewritten_one_as_in_the_gateway(change: str):
    first = exchange(user("go"), reply=said("I look.", "c1", reasoning_content="Hm."))
    echo = said("I look.", "c1", reasoning_content="Hm.")
    if change == "arguments":
        echo["tool_calls"][0]["function"]["arguments"] = '{"command": "rm"}'
    else:
        echo["reasoning_content"] = "Never."
    again = exchange(user("go"), echo, result("c1"), reply=said("done"))
    assert [said for _, said in shown(first, again)] == [["I look."], ["done"]]


@st.composite
def echoing_agents(draw: st.DrawFn) -> list[Exchange]:
    """Calls of an agent that changes only how it writes its history."""
    exchanges: list[Exchange] = []
    history = [Message("user", "go")]
    for number in range(draw(st.integers(1, 6))):
        calls = (ToolCall(f"c{number}", "bash", {"command": f"ls {number}"}),) if draw(st.booleans()) else ()
        text, thought = draw(st.sampled_from(["", "one  two", "\nok"])), draw(st.sampled_from(["", "hm  hm"]))
        reply = Message("assistant", text, thought, calls)
        sent = tuple(draw(st.sampled_from(echoes(message))) for message in history)
        exchanges.append(Exchange(prompt=Prompt(sent, (DEFAULTS,)), reply=reply, finish=Finish.STOP))
        history += [
            reply,
            Message("tool", "seen", call_id=f"c{number}") if calls else Message("user", f"more {number}"),
        ]
    return exchanges


DEFAULTS = {
    "type": "function",
    "function": {"name": "bash", "description": "", "parameters": {"properties": {"all": {"default": False}}}},
}


def echoes(message: Message) -> list[Message]:
    """The ways in which agents send a message back."""
    if message.role != "assistant":
        return [message]
    filled = tuple(replace(call, arguments={"all": False, **call.arguments}) for call in message.calls)
    return [
        message,
        replace(message, text=" ".join(message.text.split())),
        replace(message, reasoning=""),
        replace(message, calls=filled),
        *([replace(message, text="")] if message.calls else []),
    ]


@given(echoing_agents())
def test_an_agent_that_only_echoes_in_whatever_words_gives_one_conversation(exchanges: list[Exchange]):
    [conversation] = conversations_of(exchanges)
    assert [conversation.messages[place] for place in conversation.replies] == [one.reply for one in exchanges]


@given(echoing_agents())
def test_a_recorded_call_survives_its_json(exchanges: list[Exchange]):
    assert [parse_exchange(json.loads(json.dumps(exchange_json(one)))) for one in exchanges] == exchanges


def test_a_history_that_was_rewritten_is_another_conversation_in_which_old_replies_are_context():
    assert shown(
        exchange(user("go"), reply=said("one")),
        exchange(user("go"), said("one, edited"), user("more"), reply=said("two")),
        exchange(user("So far: two."), reply=said("three")),
    ) == [
        (["go", "one"], ["one"]),
        (["go", "one, edited", "more", "two"], ["two"]),
        (["So far: two.", "three"], ["three"]),
    ]


def test_a_second_branch_does_not_train_the_first_reply_again():
    first = exchange(user("go"), reply=said("one"))
    left = exchange(user("go"), said("one"), user("left"), reply=said("two"))
    right = exchange(user("go"), said("one"), user("right"), reply=said("three"))
    assert [said for _, said in shown(first, left, right)] == [["one", "two"], ["three"]]


def test_of_a_prompt_that_was_sampled_twice_the_last_reply_counts():
    assert shown(exchange(user("go"), reply=said("one")), exchange(user("go"), reply=said("uno"))) == [
        (["go", "uno"], ["uno"])
    ]


def test_a_reply_that_never_arrived_counts_only_if_the_agent_went_on_with_it():
    lost = exchange(user("go"), reply=said("one"), delivered=False)
    assert shown(lost) == []
    on = exchange(user("go"), said("one"), user("more"), reply=said("two"))
    assert [said for _, said in shown(lost, on)] == [["one", "two"]]


def test_other_tools_are_another_conversation_and_a_limit_is_remembered():
    cut = exchange(user("go"), reply=said("ha"), finish="length")
    other = exchange(user("go"), said("ha"), user("on"), reply=said("two"), tools=[])
    first, second = converted([cut, other])
    assert (first.cut, second.cut, second.tools) == ({1}, frozenset(), ())


def test_half_a_letter_is_no_text():
    [conversation] = converted([exchange(user("a\ud800"), reply=said("b\udc00", reasoning_content="\ud800"))])
    assert conversation.messages == (Message("user", "a?"), Message("assistant", "b?", "?"))


def completion(reply: Json, *messages: Json) -> str:
    response = {"model": "policy", "choices": [{"message": reply, "finish_reason": "stop"}]}
    return json.dumps({"messages": list(messages), "response": response, "kwargs": {"tools": [TOOL]}})


def test_what_openhands_logged_is_read_in_the_order_of_time(tmp_path: Path):
    parts = [{"type": "text", "text": "one"}]
    more = completion(said("two"), user("go"), {"role": "assistant", "content": parts}, user("more"))
    (tmp_path / "openai__m-1000.5.json").write_text(more)
    (tmp_path / "openai__m-999.25.json").write_text(completion(said("one"), user("go")))
    told = read_completions(tmp_path)
    [conversation] = told.conversations
    assert [message.text for message in conversation.messages] == ["go", "one", "more", "two"]
    assert (told.model, conversation.tools) == ("policy", (TOOL,))


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"response": {"choices": []}}', '{"response": null}'])
def test_a_damaged_log_is_named(tmp_path: Path, content: str):
    (file := tmp_path / "m-1.json").write_text(content)
    with pytest.raises(UnreadableError, match=str(file)):
        read_completions(tmp_path)


def test_messages_of_no_known_form_are_named(tmp_path: Path):
    (tmp_path / "m-1.json").write_text(json.dumps({"messages": [7], "response": {"choices": [{"message": said("x")}]}}))
    with pytest.raises(UnreadableError, match=str(tmp_path)):
        read_completions(tmp_path)


FIRST = exchange(user("go"), reply=said("one"), finish="length")
SECOND = exchange(user("go"), reply=said("two"))


def test_a_reply_that_was_sampled_anew_counts_after_all_if_the_agent_goes_on_with_it():
    on = exchange(user("go"), said("one"), user("more"), reply=said("three"))
    assert shown(FIRST, SECOND, on) == [(["go", "one", "more", "three"], ["one", "three"])]
    [conversation] = converted([FIRST, SECOND, on])
    assert conversation.cut == {1}


def test_of_two_replies_to_one_prompt_an_agent_may_go_on_with_both():
    left = exchange(user("go"), said("two"), user("left"), reply=said("three"))
    right = exchange(user("go"), said("one"), user("right"), reply=said("four"))
    assert shown(FIRST, SECOND, left, right) == [
        (["go", "two", "left", "three"], ["two", "three"]),
        (["go", "one", "right", "four"], ["one", "four"]),
    ]
    assert [said for _, said in shown(FIRST, SECOND, right, left)] == [["one", "four"], ["two", "three"]]


@pytest.mark.parametrize("arguments", ["{", "[1]", {"n": float("nan")}])
def test_arguments_that_are_no_json_object_are_kept_as_text(arguments: object):
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    [conversation] = converted([exchange(user("go"), reply=said("one", tool_calls=[call]))])
    assert set(conversation.messages[1].calls[0].arguments) == {"__raw__"}
