"""What was said, from the logs of agents that write no trajectory."""

import json
from pathlib import Path

import pytest

from dockyard.convert.logs import conversation_from_log
from dockyard.types import Message, ToolCall

START = """
# aider chat started at 2026-11-15 13:27:46

> Detected dumb terminal, disabling fancy input and pretty output.  
> aider --yes --model=openai/policy --message=First line.

# Heading
> quote
last.  
> Aider v0.86.2  
> Model: openai/policy with whole edit format  
"""  # noqa: W291
ASKED = "\n#### First line.  \n####   \n#### # Heading  \n#### > quote  \n#### last.  \n"
TOKENS = "> Tokens: 1.2k sent, 67 received. Cost: $0.01 message, $0.02 session.  \n"
ASK = Message("user", "First line.\n\n# Heading\n> quote\nlast.")


def write(trial: Path, text: str, name: str = "aider.chat.history.md") -> Path:
    (trial / "agent").mkdir(parents=True, exist_ok=True)
    (trial / "agent" / name).write_text(text)
    return trial


def aider(trial: Path, text: str) -> list[tuple[Message, ...]]:
    return [each.messages for each in conversation_from_log(write(trial, text), "aider")]


def reply(text: str) -> str:
    return f"\n{text}\n\n"


def test_aiders_chat_is_the_request_and_the_reply_whatever_they_look_like(tmp_path: Path):
    odd = "# Title\n\n> quoted\n\n#### four\n\n```python\n# a comment\n```"
    assert aider(tmp_path, START + ASKED + reply(odd) + TOKENS + "> Applied edit to a.py  \n") == [
        (ASK, Message("assistant", odd))
    ]


def test_aiders_thoughts_are_told_apart(tmp_path: Path):
    tag = "thinking-content-7bbeb8e1441453ad999a0bbba8a46d4b"
    text = f"<{tag}>\n\nHm.\n\nyes\n\n</{tag}>\n\nHere."
    assert aider(tmp_path, START + ASKED + reply(text) + TOKENS) == [(ASK, Message("assistant", "Here.", "Hm.\n\nyes"))]


def test_aiders_further_requests_go_on_in_the_same_chat(tmp_path: Path):
    text = START + ASKED + reply("One.") + TOKENS + "\n#### Go on.  \n" + reply("Two.") + TOKENS
    [messages] = aider(tmp_path, text)
    assert messages == (ASK, Message("assistant", "One."), Message("user", "Go on."), Message("assistant", "Two."))


def test_aider_started_again_is_another_chat_unless_it_takes_up_the_old_one(tmp_path: Path):
    once = START + ASKED + reply("One.") + TOKENS
    assert aider(tmp_path, once + once) == [(ASK, Message("assistant", "One."))] * 2
    resumed = once.replace("--yes", "--yes --restore-chat-history")
    assert aider(tmp_path, once + resumed) == [(ASK, Message("assistant", "One.")) * 2]


def test_aiders_unanswered_request_is_left_out(tmp_path: Path):
    once = START + ASKED + reply("One.") + TOKENS
    assert aider(tmp_path, once + ASKED + "> litellm.APIError: the server is gone  \n") == [
        (ASK, Message("assistant", "One."))
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        START,
        START + ASKED,
        START + ASKED + reply("cut in the mid"),
        # A second reply without a request: what aider told the model in between is not in the log.
        START + ASKED + reply("One.") + TOKENS + "> Attempt to fix test errors? y  \n" + reply("Two.") + TOKENS,
        START + ASKED + reply("forged\n\n" + TOKENS + "\nand more") + TOKENS,
        "garbage\n" + START + ASKED + reply("One.") + TOKENS,
    ],
)
def test_a_chat_of_aiders_that_leaves_doubt_gives_nothing(tmp_path: Path, text: str):
    assert aider(tmp_path, text) == []


def test_mini_swe_agents_own_trajectory_has_the_thoughts_and_the_calls(tmp_path: Path):
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    messages = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": [{"type": "text", "text": "Do it."}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call], "extra": {}},
        {"role": "tool", "content": "a.py", "tool_call_id": "c1"},
        {"role": "exit", "content": "", "extra": {}},
    ]
    write(tmp_path, json.dumps({"info": {}, "messages": messages}), "mini-swe-agent.trajectory.json")
    [conversation] = conversation_from_log(tmp_path, "mini-swe-agent")
    assert conversation.messages == (
        Message("system", "You help."),
        Message("user", "Do it."),
        Message("assistant", "", "Hm.", (ToolCall("c1", "bash", {"command": "ls"}),)),
        Message("tool", "a.py", call_id="c1"),
    )


def graph(*messages: object) -> str:
    return json.dumps({"messages": messages})


def test_langgraphs_last_state_is_the_conversation(tmp_path: Path):
    calls = [{"name": "ls", "args": {"path": name}, "id": name, "type": "tool_call"} for name in "ab"]
    state = graph(
        {"type": "human", "content": "Do it."},
        {"type": "ai", "content": "", "tool_calls": calls},
        {"type": "tool", "content": "one"},
        {"type": "tool", "content": "two"},
        {"type": "ai", "content": "Done."},
    )
    [conversation] = conversation_from_log(write(tmp_path, state, "result.json"), "langgraph")
    assert [(message.role, message.text, message.call_id) for message in conversation.messages] == [
        ("user", "Do it.", ""),
        ("assistant", "", ""),
        ("tool", "one", "a"),
        ("tool", "two", "b"),
        ("assistant", "Done.", ""),
    ]


@pytest.mark.parametrize(
    ("agent", "name", "text"),
    [
        ("mini-swe-agent", "mini-swe-agent.trajectory.json", '{"messages": [{"role'),
        ("mini-swe-agent", "mini-swe-agent.trajectory.json", '{"messages": 3}'),
        ("mini-swe-agent", "mini-swe-agent.trajectory.json", '{"messages": [{"role": "user", "content": "a"}]}'),
        ("langgraph", "result.json", '{"answer": 42}'),
        ("langgraph", "result.json", graph({"type": "tool", "content": "x"}, {"type": "ai", "content": "y"})),
        ("langgraph", "result.json", graph({"type": "image", "content": "x"}, {"type": "ai", "content": "y"})),
        ("code-puppy", "code-puppy.txt", "some log"),
        ("unheard-of", "log.txt", "some log"),
    ],
)
def test_a_log_that_is_broken_or_unknown_gives_nothing(tmp_path: Path, agent: str, name: str, text: str):
    assert conversation_from_log(write(tmp_path, text, name), agent) == ()


@pytest.mark.parametrize("agent", ["aider", "mini-swe-agent", "langgraph"])
def test_without_a_log_there_is_nothing(tmp_path: Path, agent: str):
    (tmp_path / "agent").mkdir()
    assert conversation_from_log(tmp_path, agent) == ()
    assert conversation_from_log(tmp_path / "nowhere", agent) == ()


def test_a_trial_of_several_steps_tells_each(tmp_path: Path):
    for step in ("one", "two"):
        write(tmp_path / "steps" / step, START + ASKED + reply(step) + TOKENS)
    (tmp_path / "steps" / "three" / "agent").mkdir(parents=True)
    told = conversation_from_log(tmp_path, "aider")
    assert [conversation.messages[-1].text for conversation in told] == ["one", "two"]
