"""Exactness with real tokenizers: Qwen3, Qwen2.5, Llama 3.1 and 3.2, SmolLM2, each against plain Jinja."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace

import exactness
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_agent import TOOLS, Agent, Habits, Policy, Step, echoes, habits, steps
from real_tokenizers import CALLS, real_policy
from wire_agents import WIRES, Wire

from dockyard.types import ASSISTANT, IntArray, Json, Message, Prompt, ToolCall

pytestmark = pytest.mark.tokenizers
each_model = pytest.mark.parametrize("name", [*CALLS])

SYSTEM = Message("system", "You work in a shell.")
USER = Message("user", "count the lines of out.txt")
CALL = ToolCall("call_1", "bash", {"command": "wc -l é", "timeout": 1.5})
MORE = ToolCall("call_2", "read", {})
RESULT = Message("tool", "3 out.txt\n", call_id="call_1")
RESULTS = (RESULT, Message("tool", "two", call_id="call_2"))
MARK = "the sampled turn"


def ids_of(policy: Policy, messages: Sequence[Message], tools: Sequence[Json]) -> list[int]:
    return policy.renderer.prompt(Prompt(tuple(messages), tuple(tools))).tolist()


def ints(ids: Sequence[int]) -> IntArray:
    return np.array(ids, np.int32)


def control_ids(policy: Policy, ids: Sequence[int]) -> list[int]:
    known = set(policy.control().values())
    return [token_id for token_id in ids if token_id in known]


def decoded(policy: Policy, ids: Sequence[int]) -> str:
    return policy.tokenizer.decode(list(ids), skip_special_tokens=False)


def stop_text(policy: Policy) -> str:
    return decoded(policy, [policy.stop_id])


def printed_after(policy: Policy, head: Sequence[Message], turn: Message, new: Sequence[Message]) -> str:
    """What the template prints behind a turn, found by plain Jinja in a whole history."""
    calls = tuple(replace(call, name=f"{call.name} {MARK}") for call in turn.calls)
    text = policy.plain([*head, replace(turn, text=MARK, calls=calls), *new], TOOLS, True)
    stop = stop_text(policy)
    return text[text.index(stop, text.rindex(MARK)) + len(stop) :]


def spliced(policy: Policy, sampled: list[int], turn: Message, new: Sequence[Message]) -> list[int]:
    """What follows a prompt and what was sampled on it, which have to stay as they are."""
    prompt = policy.renderer.prompt(Prompt((SYSTEM, USER), TOOLS))
    ids = policy.renderer.extend((prompt, ints(sampled)), turn.calls, new, TOOLS)
    assert ids is not None
    before = [*prompt.tolist(), *sampled]
    assert ids[: len(before)].tolist() == before
    return ids[len(before) :].tolist()


texts = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=30)
told = st.builds(lambda text: Message("user", f"user {text}"), texts)
answered = st.builds(
    lambda text, thought: Message(ASSISTANT, f"said {text}", thought and f"hm {thought}"), texts, st.just("") | texts
)
values = st.one_of(texts, st.integers(), st.booleans(), st.none(), st.lists(texts, max_size=2))
called = st.builds(
    lambda arguments, result: [
        Message(ASSISTANT, "", calls=(ToolCall("call_1", "bash", arguments),)),
        Message("tool", f"out {result}", call_id="call_1"),
    ],
    st.dictionaries(st.sampled_from(["command", "timeout", "é"]), values, max_size=3),
    texts,
)
exchanges = st.lists(st.one_of(st.tuples(answered, told).map(list), called), max_size=3).map(
    lambda pairs: [message for pair in pairs for message in pair]
)


@each_model
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["without tools", "with tools"])
def test_a_whole_history_renders_to_the_ids_of_plain_jinja(name: str, tools: tuple[Json, ...]):
    policy = real_policy(name)

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.booleans(), exchanges)
    def agrees(has_system: bool, messages: list[Message]) -> None:
        history = [*([SYSTEM] if has_system else []), USER, *messages]
        assert ids_of(policy, history, tools) == policy.ids(policy.plain(history, tools, True))

    agrees()


CALLED = Message(ASSISTANT, "", calls=(CALL,))
BOTH = Message(ASSISTANT, "", calls=(CALL, MORE))
FOLLOWED = {
    "a user": (Message(ASSISTANT, "done"), (Message("user", "again"),)),
    "two users": (Message(ASSISTANT, "done"), (Message("user", "again"), Message("user", " and é again\n"))),
    "a result": (CALLED, (RESULT,)),
    "a result and a user": (CALLED, (RESULT, Message("user", "go on"))),
    "parallel results": (BOTH, RESULTS),
    "an assistant that nobody sampled": (
        Message(ASSISTANT, "done"),
        (Message("user", "so?"), Message(ASSISTANT, "Understood."), Message("user", "go on")),
    ),
}
followed = pytest.mark.parametrize(("turn", "new"), [*FOLLOWED.values()], ids=[*FOLLOWED])


@each_model
@followed
def test_new_messages_are_printed_behind_a_sampled_turn_as_the_template_prints_them(
    name: str, turn: Message, new: tuple[Message, ...]
):
    policy = real_policy(name)
    if name == "llama3_2" and len(turn.calls) > 1:
        turn, new = CALLED, (RESULT, *new[1:])  # its template knows one call a turn
    sampled = [*policy.ids("now"), policy.stop_id]
    assert spliced(policy, sampled, turn, new) == policy.ids(printed_after(policy, [SYSTEM, USER], turn, new))


@each_model
@followed
def test_a_turn_that_was_cut_is_closed_before_new_messages(name: str, turn: Message, new: tuple[Message, ...]):
    policy = real_policy(name)
    closed = [*policy.ids("list the f"), policy.stop_id]
    assert spliced(policy, closed[:-1], turn, new)[0] == policy.stop_id
    assert spliced(policy, closed[:-1], turn, new)[1:] == spliced(policy, closed, turn, new)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-xml"])
@followed
def test_a_thought_that_was_cut_is_closed_too(name: str, turn: Message, new: tuple[Message, ...]):
    policy = real_policy(name)
    sampled = policy.ids("<think>\nlet me")
    closing = policy.ids(f"</think>{stop_text(policy)}")
    assert spliced(policy, sampled, turn, new) == [*closing, *spliced(policy, [*sampled, *closing], turn, new)]


@each_model
@followed
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_thoughts_and_any_split_of_a_turn_stay_as_they_were_sampled(
    name: str, turn: Message, new: tuple[Message, ...], pieces: int
):
    policy = real_policy(name)
    text = "<think>\nhm, é 😀\n</think>\n\nlet me list the files"
    cuts = [text[at : at + pieces] for at in range(0, len(text), pieces)]
    sampled = [*(token_id for cut in cuts for token_id in policy.ids(cut)), policy.stop_id]
    assert sampled[:-1] != policy.ids(text)
    spliced(policy, sampled, turn, new)  # holds them to the id


def hostile(policy: Policy) -> str:
    """Every control token the tokenizer knows, spelled out."""
    return "".join(f"{token}\n" for token in policy.control())


@each_model
def test_control_tokens_spelled_in_messages_and_tools_stay_text(name: str):
    policy = real_policy(name)

    def told(text: str) -> tuple[list[Message], list[Json]]:
        call = ToolCall("call_1", "bash", {"command": text, text: 1})
        parameters = {"type": "object", "properties": {text: {"type": "string", "description": text}}}
        function = {"name": "bash", "description": text, "parameters": parameters}
        messages = [
            Message("system", text),
            Message("user", text),
            Message(ASSISTANT, "", calls=(call,)),
            Message("tool", text, call_id="call_1"),
            Message(ASSISTANT, text),
            Message("user", text),
        ]
        return messages, [{"type": "function", "function": function}]

    honest, spelled = (ids_of(policy, *told(text)) for text in ("x", hostile(policy)))
    assert control_ids(policy, spelled) == control_ids(policy, honest)
    first = next(iter(policy.control()))
    assert decoded(policy, spelled).count(first) > decoded(policy, honest).count(first)


@each_model
@pytest.mark.parametrize("role", ["user", "tool"])
def test_control_tokens_spelled_in_new_messages_stay_text(name: str, role: str):
    policy = real_policy(name)
    turn = CALLED if role == "tool" else Message(ASSISTANT, "done")
    sampled = [*policy.ids("now"), policy.stop_id]

    def told(text: str) -> list[int]:
        return spliced(policy, sampled, turn, [Message(role, text, call_id="call_1" if role == "tool" else "")])

    assert control_ids(policy, told(hostile(policy))) == control_ids(policy, told("x"))
    assert hostile(policy).split("\n")[0] in decoded(policy, told(hostile(policy)))


def parsed(policy: Policy, text: str, pieces: int = 4) -> Message:
    """What an agent gets of a turn sampled in small pieces."""
    spelled = re.compile("|".join(map(re.escape, policy.control())))
    ids: list[int] = []
    for part in re.split(f"({spelled.pattern})", text):
        cuts = [part] if spelled.fullmatch(part) else [part[at : at + pieces] for at in range(0, len(part), pieces)]
        ids += [token_id for cut in cuts for token_id in policy.ids(cut)]
    prompt = policy.renderer.prompt(Prompt((SYSTEM, USER), TOOLS))
    return policy.renderer.message(ints([*ids, policy.stop_id]), prompt, TOOLS)


ARGUMENTS = '{"command": "ls \\"é\\" \\n&& true", "timeout": 1.5}'


@each_model
def test_a_tool_call_is_read_as_it_is_written(name: str):
    policy = real_policy(name)
    message = parsed(policy, policy.call("bash", ARGUMENTS))
    [call] = message.calls
    assert (call.name, call.arguments) == ("bash", json.loads(ARGUMENTS))
    assert message.text.strip() == ""
    assert call.id != parsed(policy, policy.call("bash", ARGUMENTS)).calls[0].id


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("llama3_2") and "json" not in name])
def test_parallel_calls_keep_their_order_and_the_text_before_them(name: str):
    policy = real_policy(name)
    written = f"Both.\n{policy.call('bash', ARGUMENTS)}\n{policy.call('read', '{}')}"
    message = parsed(policy, written)
    assert [call.name for call in message.calls] == ["bash", "read"]
    assert message.text.strip() == "Both."


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "qwen3-xml"])
def test_thoughts_are_told_from_what_is_said(name: str):
    policy = real_policy(name)
    message = parsed(policy, f"<think>\nhm\n</think>\n\nI look.\n{policy.call('bash', ARGUMENTS)}")
    assert (message.reasoning.strip(), message.text.strip(), len(message.calls)) == ("hm", "I look.", 1)


BROKEN = ['{"command": ', '{"command": "ls"', "ls -l"]


@each_model
@pytest.mark.parametrize("arguments", BROKEN)
def test_a_call_that_is_no_json_is_text(name: str, arguments: str):
    policy = real_policy(name)
    message = parsed(policy, policy.call("bash", arguments))
    assert message.calls == ()
    assert arguments.strip() in message.text


@each_model
def test_a_call_that_was_cut_is_text(name: str):
    policy = real_policy(name)
    written = policy.call("bash", ARGUMENTS)
    ids = policy.ids(written[: len(written) * 2 // 3])
    prompt = policy.renderer.prompt(Prompt((SYSTEM, USER), TOOLS))
    message = policy.renderer.message(ints(ids), prompt, TOOLS)
    assert message.calls == ()
    assert "bash" in message.text


@each_model
def test_random_agents_do_not_get_a_token_wrong(name: str):
    with asyncio.Runner() as runner:

        @settings(max_examples=100, deadline=None, database=None)
        @given(st.lists(steps, min_size=4, max_size=12), habits)
        def judged(steps: list[Step], habits: Habits) -> None:
            exactness.judge(runner, Agent(real_policy(name), habits), steps)

        judged()


@each_model
def test_agents_that_only_echo_give_one_segment(name: str):
    with asyncio.Runner() as runner:

        @settings(max_examples=60, deadline=None, database=None)
        @given(st.lists(echoes, min_size=2, max_size=8), st.sampled_from(WIRES))
        def judged(steps: list[Step], wire: Wire) -> None:
            recording = exactness.judge(runner, Agent(real_policy(name), Habits(wire)), steps)
            assert len(recording.segments) == (1 if recording.stats["sampled_tokens"] else 0)
            assert recording.stats["splices"] == len(steps) - 1
            assert recording.stats["reencoded_tokens"] == 0

        judged()
