"""ATIF trajectories become conversations: every history apart, copied steps as context, ids where they were kept."""

import json
from pathlib import Path
from typing import Any

import pytest
from converting import agent, ids, trajectory, user

from dockyard.convert.atif import UnreadableError, read_trajectory
from dockyard.convert.trajectory import TrajectoryText, read_trajectory_text
from dockyard.types import Message, ToolCall

type Json = dict[str, Any]

CALL = {"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}
OTHER = {"tool_call_id": "c2", "function_name": "bash", "arguments": {"command": "pwd"}}
COMPACTED = {"context_management": {"type": "compaction", "boundary": "replace"}}


def write(file: Path, *steps: Json, **more: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(trajectory(*steps, **more)))
    return file


def told_by(folder: Path, *steps: Json, **more: Any) -> TrajectoryText:
    return read_trajectory_text(write(folder / "trajectory.json", *steps, **more))


def shown(told: TrajectoryText) -> list[tuple[str, list[str], list[str]]]:
    """The name of each conversation, its messages in short, and what the model said in it."""
    return [
        (
            conversation.name,
            [f"{message.role}: {message.text}" for message in conversation.messages],
            [conversation.messages[place].text for place in conversation.replies],
        )
        for conversation in told.conversations
    ]


@pytest.mark.parametrize("version", [f"1.{minor}" for minor in range(9)])
def test_every_version_is_read(tmp_path: Path, version: str):
    told = told_by(tmp_path, user("hi"), agent("hello"), version=version)
    assert shown(told) == [("", ["user: hi", "assistant: hello"], ["hello"])]
    assert (told.model, told.notes) == ("org/model", frozenset())


def test_calls_and_their_results_are_messages_in_the_order_the_model_saw_them(tmp_path: Path):
    results = [{"source_call_id": "c2", "content": "/app"}, {"source_call_id": "c1", "content": "a b"}]
    told = told_by(
        tmp_path,
        {"source": "system", "message": "Be brief."},
        user("go"),
        agent("I look.", CALL, OTHER, results=results, reasoning_content="Hm."),
        agent("Done."),
    )
    [conversation] = told.conversations
    assert conversation.messages == (
        Message("system", "Be brief."),
        Message("user", "go"),
        Message(
            "assistant",
            "I look.",
            "Hm.",
            (ToolCall("c1", "bash", {"command": "ls"}), ToolCall("c2", "bash", {"command": "pwd"})),
        ),
        Message("tool", "/app", call_id="c2"),
        Message("tool", "a b", call_id="c1"),
        Message("assistant", "Done."),
    )
    assert conversation.replies == (2, 5)


def test_results_that_name_no_call_belong_to_the_calls_in_order_and_what_is_left_is_the_users(tmp_path: Path):
    told = told_by(
        tmp_path,
        user("go"),
        agent("", CALL, OTHER, results=[{"content": "one"}, {"content": "two"}, {"content": "three"}]),
        agent("No call.", results=[{"content": "seen"}]),
        agent("Done."),
    )
    [conversation] = told.conversations
    assert [(m.role, m.text, m.call_id) for m in conversation.messages if m.role in ("tool", "user")] == [
        ("user", "go", ""),
        ("tool", "one", "c1"),
        ("tool", "two", "c2"),
        ("user", "three", ""),
        ("user", "seen", ""),
    ]


def test_tools_are_taken_from_the_trajectory_in_any_common_form_and_never_made_up(tmp_path: Path):
    schema = {"type": "object", "properties": {}}
    definitions = [
        {"type": "function", "function": {"name": "a", "description": "A", "parameters": schema}},
        {"name": "b", "input_schema": schema},
        {"type": "odd"},
    ]
    steps = (user("go"), agent("", CALL), agent("Done."))
    with_tools = told_by(tmp_path, *steps, agent={"tool_definitions": definitions})
    assert [tool["function"]["name"] for tool in with_tools.conversations[0].tools] == ["a", "b"]
    assert with_tools.notes == frozenset()
    without = told_by(tmp_path, *steps)
    assert (without.conversations[0].tools, without.notes) == ((), {"no_tool_definitions"})
    assert told_by(tmp_path, user("go"), agent("Done.")).notes == frozenset()


def test_arguments_that_are_no_object_are_kept_as_text(tmp_path: Path):
    odd = {"tool_call_id": "c1", "function_name": "bash", "arguments": "ls -l"}
    [conversation] = told_by(tmp_path, user("go"), agent("", odd)).conversations
    assert conversation.messages[1].calls == (ToolCall("c1", "bash", {"__raw__": "ls -l"}),)


def test_copied_and_mechanical_steps_are_context(tmp_path: Path):
    told = told_by(
        tmp_path,
        user("earlier", is_copied_context=True),
        agent("old", is_copied_context=True),
        user("go"),
        agent("dispatched", llm_call_count=0),
        agent("summary", extra={"pi_event_type": "compaction"}),
        agent("new", llm_call_count=2),
    )
    assert shown(told)[0][2] == ["new"]
    assert told.notes == {"merged_replies"}


def test_a_trajectory_in_which_the_model_said_nothing_has_no_conversation(tmp_path: Path):
    told = told_by(tmp_path, user("go"), agent("", results=[{"content": "seen"}]))
    assert (told.conversations, told.notes) == ((), {"empty_replies"})


def test_a_text_that_is_given_as_thought_as_well_was_not_thought(tmp_path: Path):
    [conversation] = told_by(tmp_path, user("go"), agent("I look.", CALL, reasoning_content="I look.")).conversations
    assert conversation.messages[1].reasoning == ""


def test_pictures_are_only_mentioned(tmp_path: Path):
    parts = [{"type": "text", "text": "see"}, {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}]
    told = told_by(tmp_path, user(parts), agent("ok"))  # pyright: ignore[reportArgumentType]
    assert shown(told)[0][1][0] == "user: see\n[image]"
    assert told.notes == {"media_left_out"}


def test_a_reply_that_was_cut_is_known_where_the_agent_says_so(tmp_path: Path):
    [conversation] = told_by(tmp_path, user("go"), agent("half", extra={"stop_reason": "max_tokens"})).conversations
    assert conversation.cut == {1}


def test_a_file_that_goes_on_in_another_is_one_conversation(tmp_path: Path):
    write(tmp_path / "trajectory.cont-1.json", user("more"), agent("two"))
    told = told_by(tmp_path, user("go"), agent("one"), continued_trajectory_ref="trajectory.cont-1.json")
    assert shown(told) == [("", ["user: go", "assistant: one", "user: more", "assistant: two"], ["one", "two"])]


def test_a_continuation_that_tells_its_own_history_is_another_conversation_of_the_same_agent(tmp_path: Path):
    copied = [user("go", is_copied_context=True), agent("asked", is_copied_context=True)]
    write(tmp_path / "trajectory.cont-1.json", *copied, user("answers"), agent("two"))
    told = told_by(tmp_path, user("go"), agent("one"), continued_trajectory_ref="trajectory.cont-1.json")
    assert [(name, said) for name, _, said in shown(told)] == [("", ["one"]), ("", ["two"])]


def test_files_that_refer_to_each_other_are_read_once(tmp_path: Path):
    steps = user("go", is_copied_context=True), agent("two")
    write(tmp_path / "trajectory.cont-1.json", *steps, continued_trajectory_ref="trajectory.json")
    told = told_by(tmp_path, user("go"), agent("one"), continued_trajectory_ref="trajectory.cont-1.json")
    assert [said for *_, said in shown(told)] == [["one"], ["two"]]


def test_a_file_that_is_not_there_or_outside_the_agents_folder_is_noted(tmp_path: Path):
    write(tmp_path / "secret.json", user("x"), agent("secret"))
    for path in ("gone.json", "../secret.json", str(tmp_path / "secret.json")):
        results = [{"content": "done", "subagent_trajectory_ref": [{"trajectory_path": path}]}]
        told = told_by(tmp_path / "agent", user("go"), agent("one", CALL, results=results))
        assert ([said for *_, said in shown(told)], "file_missing" in told.notes) == ([["one"]], True)


def test_a_damaged_file_of_a_subagent_costs_only_that_one(tmp_path: Path):
    (tmp_path / "helper.json").write_text("{")
    results = [{"content": "done", "subagent_trajectory_ref": {"trajectory_path": "helper.json"}}]
    told = told_by(tmp_path, user("go"), agent("one", results=results))
    assert ([said for *_, said in shown(told)], told.notes) == ([["one"]], {"file_unreadable"})


@pytest.mark.parametrize("steps", [(), (user("x", extra={"is_sidechain": True}),)])
def test_a_trajectory_without_steps_of_its_own_tells_nothing(tmp_path: Path, steps: tuple[Json, ...]):
    assert told_by(tmp_path, *steps).conversations == ()


def test_subagents_have_conversations_of_their_own(tmp_path: Path):
    write(tmp_path / "helper.json", user("help"), agent("from a file"))
    embedded = trajectory(user("help too"), agent("from inside"), name="helper") | {"trajectory_id": "sub-1"}
    references = [{"trajectory_path": "helper.json"}, {"trajectory_id": "sub-1"}]
    results = [{"source_call_id": "c1", "content": "helped", "subagent_trajectory_ref": references}]
    told = told_by(
        tmp_path, user("go"), agent("", CALL, results=results), agent("Done."), subagent_trajectories=[embedded]
    )
    assert [(name, said) for name, _, said in shown(told)] == [
        ("", ["", "Done."]),
        ("sub-1", ["from inside"]),
        ("helper", ["from a file"]),
    ]


def test_claude_codes_sidechains_are_taken_out_of_its_own_conversation(tmp_path: Path):
    side: Json = {"extra": {"is_sidechain": True, "agent_id": "x7"}}
    told = told_by(
        tmp_path, user("go"), agent("one"), user("help", **side), agent("two"), agent("helped", **side), agent("three")
    )
    assert [(name, said) for name, _, said in shown(told)] == [("", ["one", "two", "three"]), ("x7", ["helped"])]


def test_a_summary_replaces_what_came_before_it(tmp_path: Path):
    told = told_by(
        tmp_path,
        {"source": "system", "message": "Be brief."},
        user("go"),
        agent("one"),
        {"source": "system", "message": "compacted", "extra": COMPACTED},
        user("So far: one."),
        agent("two"),
    )
    assert shown(told) == [
        ("", ["system: Be brief.", "user: go", "assistant: one"], ["one"]),
        ("", ["system: Be brief.", "user: So far: one.", "assistant: two"], ["two"]),
    ]


def terminus(text: str, *calls: Json, **more: Any) -> Json:
    return agent(text, *calls, results=[{"content": "screen"}], **more)


KEYS = {"tool_call_id": "k", "function_name": "bash_command", "arguments": {"keystrokes": "ls\n", "duration": 0.1}}
COMPLETE = {"tool_call_id": "t", "function_name": "mark_task_complete", "arguments": {}}


def test_the_replies_of_terminus_2_are_put_together_as_its_prompt_asks_for_them(tmp_path: Path):
    told = told_by(
        tmp_path,
        user("go"),
        terminus("Analysis: a\nb\nPlan: p", KEYS),
        terminus("", COMPLETE),
        terminus('{"raw": 1}'),
        terminus("Plan: wait"),
        name="terminus-2",
    )
    [conversation] = told.conversations
    said = [conversation.messages[place] for place in conversation.replies]
    assert [json.loads(message.text) for message in said] == [
        {"analysis": "a\nb", "plan": "p", "commands": [{"keystrokes": "ls\n", "duration": 0.1}]},
        {"analysis": "", "plan": "", "commands": [], "task_complete": True},
        {"raw": 1},
        {"analysis": "", "plan": "wait", "commands": []},
    ]
    assert not any(message.calls for message in said)
    assert [message.text for message in conversation.messages if message.role == "user"] == ["go", *["screen"] * 4]
    assert told.notes == {"rebuilt_replies"}


def test_in_the_xml_of_terminus_2_too(tmp_path: Path):
    extra = {"extra": {"parser": "xml"}}
    told = told_by(
        tmp_path, user("go"), terminus("Analysis: a\nPlan: p", KEYS, COMPLETE), name="terminus-2", agent=extra
    )
    [(_, _, [said])] = shown(told)
    assert said == (
        "<response>\n<analysis>\na\n</analysis>\n<plan>\np\n</plan>\n<commands>\n"
        '<keystrokes duration="0.1">ls\n</keystrokes>\n</commands>\n<task_complete>true</task_complete>\n</response>'
    )


def test_after_a_summary_terminus_2_goes_on_from_the_questions_it_asked_itself(tmp_path: Path):
    names = [f"trajectory.summarization-1-{part}.json" for part in ("summary", "questions", "answers")]
    copied = [user("first", is_copied_context=True), agent("{1}", is_copied_context=True)]
    write(tmp_path / names[0], *copied, user("Summarise."), agent("summary"), name="terminus-2-summarization-summary")
    write(tmp_path / names[1], user("Ask."), agent("questions"), name="terminus-2-summarization-questions")
    references = [{"trajectory_path": name} for name in names[:2]]
    told = told_by(
        tmp_path,
        user("first"),
        agent("{1}"),
        {
            "source": "system",
            "message": "Performed context summarization",
            "observation": {"results": [{"subagent_trajectory_ref": references}]},
            "extra": COMPACTED,
        },
        user("Answers."),
        agent("{2}"),
        name="terminus-2",
    )
    assert shown(told) == [
        ("", ["user: first", "assistant: {1}"], ["{1}"]),
        ("", ["user: first", "user: Ask.", "assistant: questions", "user: Answers.", "assistant: {2}"], ["{2}"]),
        (
            "summarization-1-summary",
            ["user: first", "assistant: {1}", "user: Summarise.", "assistant: summary"],
            ["summary"],
        ),
        ("summarization-1-questions", ["user: Ask.", "assistant: questions"], ["questions"]),
    ]
    assert told.notes == frozenset()


def test_summaries_that_nothing_refers_to_are_found_and_a_lost_one_is_noted(tmp_path: Path):
    write(tmp_path / "trajectory.summarization-1-summary.json", user("Summarise."), agent("summary"))
    marker = {"source": "system", "message": "", "extra": COMPACTED}
    told = told_by(tmp_path, user("first"), agent("{1}"), marker, user("A."), agent("{2}"), name="terminus-2")
    assert [(name, said) for name, _, said in shown(told)] == [
        ("", ["{1}"]),
        ("", ["{2}"]),
        ("summarization-1-summary", ["summary"]),
    ]
    assert told.notes == {"summary_missing"}


def test_steps_of_a_task_are_joined_only_if_the_later_tells_the_earlier_as_its_own(tmp_path: Path):
    first = write(tmp_path / "1" / "trajectory.json", user("go"), agent("one"))
    again = write(tmp_path / "2" / "trajectory.json", user("go"), agent("one"), user("more"), agent("two"))
    copied = write(tmp_path / "3" / "trajectory.json", user("go"), agent("one", is_copied_context=True), agent("three"))
    assert [said for *_, said in shown(read_trajectory_text(first, again))] == [["one", "two"]]
    assert [said for *_, said in shown(read_trajectory_text(first, copied))] == [["one"], ["three"]]


def test_ids_that_were_kept_stay_with_their_conversation(tmp_path: Path):
    told = told_by(
        tmp_path,
        user("go"),
        agent("one", **ids([1, 2], [3], [-0.5])),
        agent("two", metrics={"prompt_tokens": 4}),
        agent("three", **ids([1, 2, 3, 4], [5])),
        agent("copied", is_copied_context=True, **ids([9], [9])),
    )
    [turns] = told.turns
    assert [(turn.prompt_ids.tolist(), turn.sampled_ids.tolist()) for turn in turns] == [
        ([1, 2], [3]),
        ([1, 2, 3, 4], [5]),
    ]
    assert [None if turn.logprobs is None else turn.logprobs.tolist() for turn in turns] == [[-0.5], None]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not an ATIF trajectory: Invalid JSON"),
        ("[]", "is not an ATIF trajectory"),
        ('{"schema_version": "ATIF-v1.8"}', "`steps`: Field required"),
        ('{"schema_version": "ATIF-v2.0", "steps": []}', "is `ATIF-v2.0`; `ATIF-v1.0` to `ATIF-v1.8` are supported"),
        ('{"schema_version": "ATIF-v1.8", "steps": [{"source": "robot"}]}', "`steps.0.source`"),
    ],
)
def test_a_file_that_is_no_trajectory_is_named(tmp_path: Path, content: str, message: str):
    (file := tmp_path / "t.json").write_text(content)
    with pytest.raises(UnreadableError) as caught:
        read_trajectory(file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


def test_what_is_not_in_the_format_does_not_hinder(tmp_path: Path):
    told = told_by(tmp_path, user("go", mood="good"), agent("ok", speed=3), somewhere={"else": 1})
    assert shown(told)[0][2] == ["ok"]
