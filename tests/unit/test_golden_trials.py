"""Real trial folders of real agents become training data. `tests/support/golden_trials.py` creates the folders again.

Each agent got the same story, so trained tokens can be compared with what the policy sampled.
"""

import json
import re
import shutil
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from npm_tokenizers import tokenizer_dir

from dockyard.convert.conversation import Conversation, Converted
from dockyard.convert.read import read_trials
from dockyard.convert.samples import SampleNumbers, converted_samples
from dockyard.convert.traces import write_traces
from dockyard.gateway.render.renderer import Renderer
from dockyard.types import Message, Segment

TRIALS = Path(__file__).parents[1] / "data" / "trials"
TEXTS = ("I write it.", "", "Two spaces.", "", "", "Once more.", "Done: thé.")
THOUGHTS = ("What is asked?", "Is it there?", "", "", "A question.", "", "That is all.")
NO_THOUGHTS = ("",) * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What the policy said, as far as the agent kept it."""

    roles: str
    """The first letter of each message's."""
    texts: tuple[str, ...] = TEXTS
    thoughts: tuple[str, ...] = THOUGHTS
    calls: tuple[str, ...] = ()
    """Names, those of one turn with spaces between."""
    tools: int = 0


TERMINUS = ("What is asked?", "Is it there?", "", "", "A question.", "", "", "That is all.")
STORIES = {
    "qwen-coder": Story(
        roles="uatattatatatata",
        calls=("write_file", "run_shell_command read_file", "edit", "run_shell_command", "edit", "grep_search", ""),
    ),
    "claude-code": Story(roles="uatattatatatata", calls=("Write", "Bash Read", "Edit", "Bash", "Edit", "Bash", "")),
    "codex": Story(
        roles="suuatattatatatata",
        thoughts=NO_THOUGHTS[:7],
        calls=("exec_command", "exec_command exec_command", *["exec_command"] * 4, ""),
    ),
    "mini-swe-agent": Story(
        roles="suatattatatatat",
        texts=(*TEXTS[:5], "Done."),
        thoughts=(*THOUGHTS[:5], ""),
        calls=("bash", "bash bash", *["bash"] * 4),
    ),
    "openhands": Story(
        roles="suatattatatata",
        texts=(*TEXTS[:5], "Done."),
        thoughts=("What is asked?", "Is it there?", "", "", "", ""),
        calls=("execute_bash", "execute_bash execute_bash", *["execute_bash"] * 2, "str_replace_editor", "finish"),
        tools=6,
    ),
    "shell": Story(
        roles="suauauauaua",
        texts=(
            "```bash\necho café > hello.txt\n```",
            "```bash\nsed -i -e 's/^/thé ou /' -e 's/$/?/' hello.txt\n```",
            "```bash\ncat hello.txt\n```",
            "Done: thé.",
        ),
        thoughts=("What is asked?", "", "", "That is all."),
        calls=("",) * 4,
    ),
    "aider": Story(roles="ua", texts=("Here:\n\nhello.txt\n```\nthé ou café?\n```",), thoughts=("Hm.",), calls=("",)),
}
TYPED = (
    ["echo café > hello.txt\n"],
    ["cat hello.txt\n", "pwd\n"],
    ["sed -i 's/^/thé ou /' hello.txt\n"],
    ["printf '%s\\n' \"<|im_end|>\" é\n"],
    ["sed -i 's/$/?/' hello.txt\n"],
    ["wc -c hello.txt\n"],
    [],
    [],
)
"""What terminus-2 was to type, turn by turn."""


@cache
def renderer() -> Renderer:
    return Renderer.load(tokenizer_dir("qwen3"))


@cache
def converted(name: str) -> Converted:
    [one] = read_trials(TRIALS / name, renderer())
    return one


def only(one: Converted) -> tuple[Conversation, Segment]:
    [conversation], [segment] = one.conversations, one.rollout.segments
    return conversation, segment


def trained_texts(segment: Segment) -> list[str]:
    """Each stretch of trained tokens, read aloud."""
    edges = np.flatnonzero(np.diff(segment.sampled.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    return [renderer().text(segment.token_ids[start:end]) for start, end in edges]


def as_qwen_writes(message: Message) -> str:
    thought = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
    calls = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments_json()}}}\n</tool_call>'
        for call in message.calls
    ]
    return thought + "\n".join(part for part in (message.text, *calls) if part) + "<|im_end|>"


@pytest.mark.parametrize("name", STORIES)
def test_an_agents_trial_tells_what_the_policy_said(name: str):
    one, story = converted(name), STORIES[name]
    conversation, _ = only(one)
    assert (one.skipped, one.agent, one.rollout.task, one.rollout.reward, one.exact) == (
        None,
        name,
        "hello",
        1.0,
        False,
    )
    assert "".join(message.role[0] for message in conversation.messages) == story.roles
    replies = [conversation.messages[place] for place in conversation.replies]
    assert tuple(reply.text.strip() for reply in replies) == story.texts
    assert tuple(reply.reasoning.strip() for reply in replies) == story.thoughts
    assert tuple(" ".join(call.name for call in reply.calls) for reply in replies) == story.calls
    assert len(conversation.tools) == story.tools


@pytest.mark.parametrize("name", [*STORIES, "terminus-2", "terminus-2-raw"])
def test_exactly_the_policys_messages_are_trained(name: str):
    conversation, segment = only(converted(name))
    expected = [as_qwen_writes(conversation.messages[place]) for place in conversation.replies]
    assert trained_texts(segment) == expected
    masked = renderer().text(segment.token_ids[~segment.sampled])
    for message in conversation.messages[: conversation.replies[-1]]:
        assert message.role == "assistant" or message.text.strip() in masked


@pytest.mark.parametrize("name", ["terminus-2", "terminus-2-raw", "terminus-2-ids"])
def test_terminus_replies_are_the_json_that_it_understood(name: str):
    conversation, _ = only(converted(name))
    replies = [conversation.messages[place] for place in conversation.replies]
    read = [json.loads(reply.text) for reply in replies]
    assert [[command["keystrokes"] for command in reply["commands"]] for reply in read] == list(TYPED)
    assert [reply.get("task_complete", False) for reply in read] == [False] * 6 + [True] * 2
    assert tuple(reply.reasoning.strip() for reply in replies) == TERMINUS
    assert {message.role for message in conversation.messages} == {"user", "assistant"}


def test_ids_that_terminus_kept_are_trained_as_they_were_sampled():
    one = converted("terminus-2-ids")
    [detail] = json.loads((TRIALS / "terminus-2-ids" / "result.json").read_text())["agent_result"]["rollout_details"]
    [segment] = one.rollout.segments
    assert (one.exact, one.rollout.reward) == (True, 1.0)
    assert segment.token_ids.tolist() == detail["prompt_token_ids"][-1] + detail["completion_token_ids"][-1]
    assert segment.token_ids[segment.sampled].tolist() == list(chain(*detail["completion_token_ids"]))
    assert segment.logprobs is not None
    assert segment.logprobs[segment.sampled].tolist() == list(chain(*detail["logprobs"]))


def test_without_their_ids_the_same_words_are_trained():
    [one] = read_trials(TRIALS / "terminus-2-ids", renderer(), exact=False)
    [segment] = one.rollout.segments
    assert not one.exact
    assert trained_texts(segment) == trained_texts(only(converted("terminus-2"))[1])


@pytest.mark.parametrize("name", ["terminus-2-summary", "terminus-2-linear"])
def test_a_summarised_history_is_told_in_parts_and_each_reply_trained_once(name: str):
    one = converted(name)
    assert sorted((each.name, len(each.replies)) for each in one.conversations) == [
        ("", 2),
        ("", 3),
        ("summarization-1-answers", 1),
        ("summarization-1-questions", 1),
        ("summarization-1-summary", 1),
    ]
    assert len(one.rollout.segments) == 5
    trained = sorted(text for segment in one.rollout.segments for text in trained_texts(segment))
    assert trained == sorted(
        as_qwen_writes(each.messages[place]) for each in one.conversations for place in each.replies
    )
    assert {"What is left?<|im_end|>", "Nothing.<|im_end|>"} < set(trained)


def test_a_subagent_is_a_conversation_of_its_own():
    main, helper = converted("claude-code-subagent").conversations
    said = [[each.messages[place].text for place in each.replies] for each in (main, helper)]
    assert said == [["I write it.", "I ask.", "I wait.", "One file."], ["", "There is one."]]
    assert (main.name, helper.messages[0].text) == ("", "COUNT the files of this folder")
    assert helper.name
    assert len(converted("claude-code-subagent").rollout.segments) == 2


def test_examples_that_the_agent_gave_are_context():
    conversation, segment = only(converted("shell"))
    assert conversation.messages[2].text == "```bash\necho hi\n```"
    assert 2 not in conversation.replies
    assert "echo hi\n" in renderer().text(segment.token_ids[~segment.sampled])


def test_an_agent_that_asks_no_model_is_named_as_such():
    one = converted("oracle")
    assert (one.skipped, one.conversations, one.rollout.segments, one.rollout.reward) == ("no_model_calls", (), (), 1.0)
    assert one.detail


@pytest.mark.parametrize("name", ["aider", "claude-code", "qwen-coder"])
def test_a_trial_that_lost_its_words_is_named_as_such(name: str, tmp_path: Path):
    shutil.copytree(TRIALS / name, tmp_path / name)
    shutil.rmtree(tmp_path / name / "agent")
    (tmp_path / name / "agent").mkdir()
    [one] = read_trials(tmp_path / name, renderer())
    assert (one.skipped, one.conversations, one.rollout.segments, one.rollout.reward) == ("no_trajectory", (), (), 1.0)


def test_the_folder_is_a_job_of_all_of_them_with_a_group_for_each_agent():
    numbers = SampleNumbers()
    read = list(read_trials(TRIALS, renderer()))
    assert sorted(one.trial for one in read) == sorted(folder.name for folder in TRIALS.iterdir())
    assert {one.trial for one in read if one.skipped is not None} == {"oracle"}
    made = [sample for one in read for sample in converted_samples(one, numbers, renderer())]
    assert len(made) == sum(len(one.rollout.segments) for one in read)
    groups = {sample.metadata["agent"]: sample.group_index for sample in made}
    assert len(set(groups.values())) == len(groups) == 8
    assert all(sample.group_index == groups[sample.metadata["agent"]] for sample in made)
    assert len({sample.rollout_id for sample in made}) == len(read) - 1
    for sample in made:
        assert sample.prompt + sample.response == renderer().text(sample.tokens)
        assert sample.loss_mask.any()


def test_traces_of_them_become_the_same_tokens(tmp_path: Path):
    told = [one for one in read_trials(TRIALS, renderer(), exact=False) if one.skipped is None]
    assert write_traces(tmp_path / "traces.parquet", told) == len(told)
    again = list(read_trials(tmp_path / "traces.parquet", renderer()))
    for one, other in zip(told, again, strict=True):
        assert (one.trial, one.agent, one.model, one.rollout.task) == (
            *(other.trial, other.agent, other.model, other.rollout.task),
        )
        assert [(each.messages, each.tools, each.replies) for each in one.conversations] == [
            (each.messages, each.tools, each.replies) for each in other.conversations
        ]
        for segment, same in zip(one.rollout.segments, other.rollout.segments, strict=True):
            assert np.array_equal(segment.token_ids, same.token_ids)
            assert np.array_equal(segment.sampled, same.sampled)


def test_the_folders_name_no_machine():
    allowed = re.compile(r"http://gateway:8000|root@container")
    for file in TRIALS.rglob("*"):
        text = allowed.sub("", file.read_text()) if file.is_file() else ""
        assert not re.search(r"http://[0-9]|root@|/home/|/tmp/(?!aider|codex|claude|listing)", text), file
