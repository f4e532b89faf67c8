"""Files of traces: Harbor's columns, ours and older ones."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gateway_fakes import tiny_renderer
from harbor.utils.traces_utils import collect_conversations_from_trial, load_run_metadata

from dockyard.convert.conversation import Conversation, Converted
from dockyard.convert.read import read_trials
from dockyard.convert.traces import Trace, read_traces, write_traces
from dockyard.errors import DockyardError
from dockyard.types import Blame, Failure, Message, Rollout, ToolCall

TRIALS = Path(__file__).parents[1] / "data" / "trials"
TOOL = {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object"}}}
CALL = ToolCall("c1", "bash", {"command": "ls é"})
TOLD = Conversation(
    messages=(
        Message("system", "You help."),
        Message("user", "Do it."),
        Message("assistant", "I look.", "Hm.\n", (CALL,)),
        Message("tool", "a.py\n", call_id="c1"),
        Message("assistant", "Done."),
        Message("user", "late"),
    ),
    tools=(TOOL,),
    cut=frozenset({4}),
)
HARBOR_TOLD = [
    {"role": "user", "content": f"<tools>\n{json.dumps([TOOL], indent=2)}\n</tools>\n\nYou help."},
    {"role": "user", "content": "Do it."},
    {
        "role": "assistant",
        "content": '<think>Hm.\n</think>\nI look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls é"}}\n'
        "</tool_call>",
    },
    {"role": "user", "content": "a.py\n"},
    {"role": "assistant", "content": "Done."},
]


def trial(*conversations: Conversation, reward: float | None = 1.0, name: str = "fix__1") -> Converted:
    failure = Failure(cause="environment_died", blame=Blame.INFRASTRUCTURE, message="m") if reward is None else None
    rollout = Rollout(task="fix", kind="", attempt=0, segments=(), reward=reward, failure=failure)
    return Converted(
        where="nowhere", trial=name, agent="claude-code", model="m/x", rollout=rollout, conversations=conversations
    )


def written(path: Path, *trials: Converted) -> list[dict[str, Any]]:
    write_traces(path, trials)
    return pq.read_table(path).to_pylist()


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def harbor_row(messages: Sequence[dict[str, str]], **fields: object) -> dict[str, Any]:
    """As an older `harbor traces export` wrote it."""
    row = {"agent": "qwen-coder", "model": "x", "task": "fix", "episode": "episode-0", "run_id": "r"}
    return {"conversations": list(messages), **row, "trial_name": "fix__1", "result": "1.0", **fields}


def said(*texts: str) -> list[dict[str, str]]:
    """User and assistant in turns."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def texts(conversation: Conversation) -> list[str]:
    return [message.text for message in conversation.messages]


def test_a_written_conversation_has_harbors_columns_and_words(tmp_path: Path):
    [row] = written(tmp_path / "traces.parquet", trial(TOLD))
    assert row["conversations"] == HARBOR_TOLD
    columns = ("agent", "model", "model_provider", "task", "episode", "trial_name", "result", "trace_source")
    assert [row[name] for name in columns] == [
        *("claude-code", "m/x", "m", "fix", "episode-1", "fix__1", "1.0", "main"),
    ]
    assert json.loads(row["tool_definitions"]) == [TOOL]


def test_what_was_written_is_read_back_the_same(tmp_path: Path):
    copied = replace(TOLD, sampled=frozenset({4}), name="explore", tools=())
    path = tmp_path / "traces.parquet"
    assert write_traces(path, [trial(TOLD, copied), trial(name="fix__2"), trial(TOLD, name="fix__3", reward=None)]) == 2
    first, lost = read_traces(path)
    assert first.conversations == (replace(TOLD, sampled=frozenset({2, 4})), copied)
    assert (first.trial, first.task, first.agent, first.model, first.reward) == (
        "fix__1",
        "fix",
        "claude-code",
        "m/x",
        1.0,
    )
    assert (lost.trial, lost.result, lost.reward) == ("fix__3", "environment_died", None)


@pytest.mark.parametrize("name", ["qwen-coder", "claude-code", "codex"])
def test_a_real_trial_is_written_as_harbor_itself_exports_it(tmp_path: Path, name: str):
    from dockyard.convert.read import read_trials

    folder = tmp_path / name
    shutil.copytree(TRIALS / name, folder)
    config = json.loads((folder / "result.json").read_text())
    config["config"]["agent"]["name"] = name  # Harbor's exporter does not know agents by their import path
    (folder / "result.json").write_text(json.dumps(config))
    [theirs] = collect_conversations_from_trial(folder, load_run_metadata(folder), episodes="last")
    [ours] = written(tmp_path / "traces.parquet", *read_trials(folder, None))
    assert ours["conversations"] == theirs["conversations"]
    same = ("model_provider", "date", "episode", "run_id", "trial_name", "result")
    assert {column: ours[column] for column in same} == {column: theirs[column] for column in same}


def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path: Path):
    def broken():
        yield trial(TOLD)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_traces(tmp_path / "traces.parquet", broken())
    assert list(tmp_path.iterdir()) == []


def test_pandas_reads_what_was_written(tmp_path: Path):
    written(tmp_path / "traces.parquet", trial(TOLD), trial(TOLD, name="fix__2", reward=None))
    frame = pandas.read_parquet(tmp_path / "traces.parquet")
    assert list(frame["conversations"][1]) == HARBOR_TOLD
    assert frame["reward"].isna().tolist() == [False, True]


def read_one(path: Path) -> Trace:
    [trace] = read_traces(path)
    return trace


def test_harbors_words_become_roles_thoughts_calls_and_tools_again(tmp_path: Path):
    trace = read_one(parquet(tmp_path / "t.parquet", harbor_row(HARBOR_TOLD)))
    [conversation] = trace.conversations
    system, user, look, result, done = conversation.messages
    assert (system, user) == (Message("system", "You help."), Message("user", "Do it."))
    assert (look.text, look.reasoning, look.calls[0].name) == ("I look.", "Hm.\n", "bash")
    assert look.calls[0].arguments == {"command": "ls é"}
    assert result == Message("tool", "a.py\n", call_id=look.calls[0].id)
    assert (done, conversation.tools) == (Message("assistant", "Done."), (TOOL,))
    assert (trace.reward, trace.where) == (1.0, f"{tmp_path}/t.parquet row 1")


def test_a_row_for_each_reply_is_one_conversation_with_each_reply_sampled_once(tmp_path: Path):
    whole = said("a", "b", "c", "d", "e", "f")
    rows = [harbor_row(whole[:length], episode=f"episode-{number}") for number, length in enumerate((2, 4, 6))]
    [conversation] = read_one(parquet(tmp_path / "t.parquet", *reversed(rows))).conversations
    assert texts(conversation) == list("abcdef")
    assert conversation.replies == (1, 3, 5)


def test_what_every_rows_end_shows_to_be_copied_is_not_sampled(tmp_path: Path):
    prior = said("old", "copied")
    rows = [
        harbor_row([*prior, *said("a", "b")], episode="episode-0"),
        harbor_row([*prior, *said("a", "b", "c", "d")], episode="episode-1"),
    ]
    [conversation] = read_one(parquet(tmp_path / "t.parquet", *rows)).conversations
    assert [conversation.messages[place].text for place in conversation.replies] == ["b", "d"]


def test_a_history_that_begins_anew_is_another_conversation(tmp_path: Path):
    rows = [
        harbor_row(said("a", "b"), episode="episode-0"),
        harbor_row(said("a", "b", "c", "d"), episode="episode-1"),
        harbor_row(said("summary of a", "b", "e", "f"), episode="episode-3"),
    ]
    first, second = read_one(parquet(tmp_path / "t.parquet", *rows)).conversations
    assert (texts(first), first.replies) == (list("abcd"), (1, 3))
    assert (texts(second), second.replies) == (["summary of a", "b", "e", "f"], (3,))


def test_a_reply_that_is_told_again_with_its_call_in_another_history_is_trained_once(tmp_path: Path):
    look, run = (f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in ("look", "run"))
    rows = [
        harbor_row(said("a", look, "seen", "done"), episode="episode-1"),
        harbor_row(said("again", run, "ran", look, "seen", "b"), episode="episode-4"),
    ]
    first, second = read_one(parquet(tmp_path / "t.parquet", *rows)).conversations
    assert (first.replies, second.replies) == ((1, 3), (1, 5))
    assert second.messages[1].calls[0].id != second.messages[3].calls[0].id


def test_subagents_that_stand_behind_other_trials_belong_to_their_own(tmp_path: Path):
    rows = [
        harbor_row(said("a", "b"), trial_name="one__1", trace_source="main"),
        harbor_row(said("c", "d"), trial_name="two__1", trace_source="main"),
        harbor_row(said("e", "f", "g", "h"), trial_name="one__1", trace_source="summarization-1-summary"),
    ]
    two, one = read_traces(parquet(tmp_path / "t.parquet", *rows))
    assert (two.trial, len(two.conversations)) == ("two__1", 1)
    assert [(each.name, texts(each)) for each in one.conversations] == [
        ("", ["a", "b"]),
        ("summarization-1-summary", list("efgh")),
    ]


def test_sharegpt_messages_and_missing_columns_are_read(tmp_path: Path):
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    trace = read_one(parquet(tmp_path / "t.parquet", {"conversations_sharegpt": turns, "trial_name": "fix__x"}))
    assert [message.role for message in trace.conversations[0].messages] == ["system", "user", "assistant"]
    assert (trace.task, trace.trial, trace.agent, trace.result, trace.reward) == ("fix", "fix__x", "", "", None)


def test_conversations_as_json_and_in_parts_are_read(tmp_path: Path):
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
    ]
    trace = read_one(parquet(tmp_path / "t.parquet", {"messages": json.dumps(turns), "task": "fix"}))
    assert texts(trace.conversations[0]) == ["a\nb", "c"]
    assert (trace.trial, trace.task) == ("row-1", "fix")


def test_an_instruction_column_says_what_a_conversation_begins_with(tmp_path: Path):
    row = harbor_row([{"role": "assistant", "content": "b"}], instruction="Do it.")
    assert texts(read_one(parquet(tmp_path / "t.parquet", row)).conversations[0]) == ["Do it.", "b"]


@pytest.mark.parametrize("result", ["AgentTimeoutError", "nan", "inf"])
def test_what_is_no_finite_number_is_no_reward(tmp_path: Path, result: str):
    trace = read_one(parquet(tmp_path / "t.parquet", harbor_row(said("a", "b"), result=result)))
    assert (trace.result, trace.reward) == (result, None)


def test_joined_results_of_several_calls_stay_the_users_words_and_are_noted(tmp_path: Path):
    calls = "\n".join(f'<tool_call>\n{{"name": "bash", "arguments": {{"n": {n}}}}}\n</tool_call>' for n in (1, 2))
    row = harbor_row(said("a", f"I look.\n{calls}", "one\ntwo", "done"))
    trace = read_one(parquet(tmp_path / "t.parquet", row))
    messages = trace.conversations[0].messages
    assert [call.arguments for call in messages[1].calls] == [{"n": 1}, {"n": 2}]
    assert len({call.id for call in messages[1].calls}) == 2
    assert (messages[1].text, messages[2]) == ("I look.", Message("user", "one\ntwo"))
    assert trace.notes == {"joined_results"}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot json\n</tool_call>",
        '<tool_call>\n{"name": 1}\n</tool_call>',
        "<think>never ends",
        "<tool_call>",
    ],
)
def test_what_only_looks_like_a_call_or_a_thought_stays_text(tmp_path: Path, text: str):
    [conversation] = read_one(parquet(tmp_path / "t.parquet", harbor_row(said("a", text)))).conversations
    assert conversation.messages[1] == Message("assistant", text)


def test_terminus_replies_are_put_together_as_its_prompt_asks(tmp_path: Path):
    call = '<tool_call>\n{"name": "bash_command", "arguments": {"keystrokes": "ls\\n", "duration": 0.1}}\n</tool_call>'
    row = harbor_row(said("a", f"<think>Hm.</think>\nAnalysis: x\nPlan: y\n{call}", "screen", "z"), agent="terminus-2")
    trace = read_one(parquet(tmp_path / "t.parquet", row))
    _, reply, screen, last = trace.conversations[0].messages
    assert json.loads(reply.text)["commands"] == [{"keystrokes": "ls\n", "duration": 0.1}]
    assert (reply.reasoning, reply.calls, screen, last.text) == ("Hm.", (), Message("user", "screen"), "z")
    assert "rebuilt_replies" in trace.notes


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ([], "it is empty"),
        (None, "it is empty"),
        ([{"role": "user", "content": "a"}], "it has no message of the assistant"),
        (
            [{"role": "judge", "content": "a"}, {"role": "assistant", "content": "b"}],
            "message 1 has the unknown role `judge`",
        ),
    ],
)
def test_a_row_without_a_conversation_is_named_and_the_others_are_read(tmp_path: Path, cell: object, problem: str):
    rows = [harbor_row(said("a", "b")), {**harbor_row([], trial_name="bad__1"), "conversations": cell}]
    good, bad = read_traces(parquet(tmp_path / "t.parquet", *rows))
    assert (len(good.conversations), good.problem) == (1, "")
    assert (bad.conversations, bad.problem) == ((), f"`conversations` of row 2: {problem}")


def test_a_damaged_cell_of_ours_is_named(tmp_path: Path):
    row = harbor_row(said("a", "b"), conversation_json='{"messages": [')
    trace = read_one(parquet(tmp_path / "t.parquet", row))
    assert trace.problem.startswith("`conversation_json` of row 1 is damaged")


@pytest.mark.parametrize(
    ("row", "needed"),
    [
        ({"text": "a", "task": "t"}, "`conversations`"),
        ({"conversations": said("a", "b"), "text": "x"}, "`task` or `trial_name`"),
    ],
)
def test_a_parquet_of_something_else_is_named_with_the_columns_found_and_needed(
    tmp_path: Path, row: dict[str, Any], needed: str
):
    with pytest.raises(DockyardError, match="is not a trace file") as error:
        list(read_traces(parquet(tmp_path / "t.parquet", row)))
    found, wanted = error.value.message.splitlines()[1:]
    assert all(f"`{name}`" in found for name in row)
    assert needed in wanted


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path):
    (tmp_path / "t.parquet").write_text("hello")
    with pytest.raises(DockyardError, match="t.parquet` cannot be read"):
        list(read_traces(tmp_path / "t.parquet"))


def test_a_file_without_rows_gives_nothing(tmp_path: Path):
    write_traces(tmp_path / "t.parquet", [])
    assert list(read_traces(tmp_path / "t.parquet")) == []


def attempt(path: Path, **fields: object) -> Converted:
    [found] = read_trials(parquet(path / "t.parquet", harbor_row(said("a", "b"), **fields)), tiny_renderer())
    return found


@pytest.mark.parametrize("word", ["None", "nan", "True", "resolved", "pass", "Error-like text"])
def test_a_word_that_is_no_exception_says_nothing_of_the_reward(tmp_path: Path, word: str):
    found = attempt(tmp_path, result=word)
    assert (found.skipped, found.rollout.reward, found.rollout.failure) == ("no_reward", None, None)
    assert found.detail == f"`result` is `{word}`, neither a reward nor an exception"
    rewarded = attempt(tmp_path, result=word, reward=0.5)
    assert (rewarded.skipped, rewarded.rollout.reward, rewarded.rollout.failure) == (None, 0.5, None)


@pytest.mark.parametrize("name", ["AgentTimeoutError", "SomeOtherError", "OddException"])
def test_an_exception_that_the_policy_can_have_caused_is_a_noted_zero_or_the_reward_that_is_told(
    tmp_path: Path, name: str
):
    found = attempt(tmp_path, result=name)
    assert (found.skipped, found.rollout.reward, found.notes) == (None, 0.0, ("failed_unrewarded",))
    told = attempt(tmp_path, result=name, reward=0.5)
    assert (told.skipped, told.rollout.reward, told.notes) == (None, 0.5, ())
    assert told.rollout.failure is not None


@pytest.mark.parametrize("name", ["CancelledError", "Timeout", "ApiRateLimitError", "engine_down"])
def test_what_the_policy_cannot_have_caused_has_no_reward(tmp_path: Path, name: str):
    found = attempt(tmp_path, result=name)
    assert (found.skipped, found.detail, found.rollout.reward) == ("no_reward", f"`result` is `{name}`", None)


def test_a_file_that_says_no_results_keeps_its_tokens_with_a_note(tmp_path: Path):
    found = attempt(tmp_path, result=None)
    assert (found.skipped, found.rollout.reward, found.notes) == (None, None, ("no_reward",))
