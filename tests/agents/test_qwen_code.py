"""qwen-code over Chat Completions: it re-serializes arguments, trims reasoning, and retries replies that it rejects."""

from pathlib import Path

import pytest
from agent_clis import need
from agent_stories import STORY_END, TASK, UNTIL_LAST_WORDS, Start, last_words, roll_out, tell
from scripted_policy import (
    Say,
    assert_one_segment,
    assert_trained_as_drawn,
    call,
    lines,
    tool_call,
    turn,
    voices,
)

from dockyard.engine.protocol import ContextOverflow
from dockyard.types import Finish


@pytest.fixture(autouse=True)
def installed() -> None:
    need("qwen")


START: Start = lambda desk: desk.qwen_code(TASK)  # noqa: E731
BARE: Start = lambda desk: desk.qwen_code(TASK, "--bare")  # noqa: E731
WRITE = turn("I write it.", call("run_shell_command", command="echo one > a.txt"), thought="Hm.")


async def test_seven_calls_with_odd_json_are_one_segment(tmp_path: Path):
    rolled = await tell("qwen-code", tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert rolled.read("hello.txt") == STORY_END
    assert len(rolled.engine.drawn) == 7
    assert_one_segment(rolled.engine, rolled.recording.segments)


async def test_a_malformed_call_is_text_to_the_agent_and_still_trained(tmp_path: Path):
    broken = Say("Writing.\n" + tool_call('{"name": "run_shell_command", "arguments": {"command": "echo'))
    rolled = await roll_out(BARE, lines(WRITE, broken), tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert '{"command": "echo' in rolled.ran.output
    assert rolled.read("a.txt") == "one\n"
    assert len(rolled.engine.drawn) == 2
    assert_one_segment(rolled.engine, rolled.recording.segments)


@pytest.mark.parametrize(
    "refused",
    [Say("<think>\nI could go on for", finish=Finish.LENGTH), Say("<think>\nHm.\n</think>\n\n")],
    ids=["cut", "thoughts alone"],
)
async def test_a_turn_that_it_has_sampled_again_is_not_trained(refused: Say, tmp_path: Path):
    rolled = await roll_out(BARE, lines(WRITE, refused, turn("Done.")), tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    first, dropped, last = rolled.engine.drawn
    assert dropped.prompt_ids.tolist() == last.prompt_ids.tolist()
    assert len(rolled.recording.segments) == 1
    assert_trained_as_drawn(rolled.engine, rolled.recording.segments, [first, last])
    assert rolled.recording.stats["dropped_retries"] == 1


async def test_an_overflow_makes_it_compact_and_every_part_is_trained(tmp_path: Path):
    full = ContextOverflow(prompt_tokens=99_999, context_length=20_000)
    summary = Say("<state_snapshot>I wrote a.txt.</state_snapshot>")
    after = turn("Going on.", call("run_shell_command", command="echo two > b.txt"))
    script = voices(("summarizes a conversation", lines(summary)), main=lines(WRITE, full, after, turn("Done.")))
    rolled = await roll_out(BARE, script, tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert (rolled.read("a.txt"), rolled.read("b.txt")) == ("one\n", "two\n")
    assert len(rolled.engine.drawn) == 4
    # The story and its summary; the first turn after it, whose history the agent then rewrites; the rest.
    assert len(rolled.recording.segments) == 3
    assert_trained_as_drawn(rolled.engine, rolled.recording.segments)


async def test_a_subagent_is_a_segment_of_its_own(tmp_path: Path):
    ask = call("agent", description="count", prompt="COUNT the files of this folder", subagent_type="general-purpose")
    helper = lines(
        turn("", call("run_shell_command", command="ls > listing.txt")),
        last_words(tmp_path, turn("There is one.", thought="So.")),
    )
    # It runs in the background, and a main agent that is done first would end it.
    wait = call("run_shell_command", command=UNTIL_LAST_WORDS, is_background=False)
    main = lines(WRITE, turn("I ask.", ask), turn("I wait.", wait), turn("One file."), turn("As I said."))
    rolled = await roll_out(START, voices(("COUNT the files", helper), main=main), tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert "a.txt" in rolled.read("listing.txt")
    assert len(rolled.engine.drawn) in (6, 7)  # the helper's report may come before or after the last turn
    assert len(rolled.recording.segments) == 2
    assert_trained_as_drawn(rolled.engine, rolled.recording.segments)


async def test_a_failing_engine_is_asked_again_and_leaves_no_trace(tmp_path: Path):
    rolled = await roll_out(BARE, lines(WRITE, RuntimeError("no memory"), turn("Done.")), tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert len(rolled.engine.prompts) == 3
    assert len(rolled.engine.drawn) == 2
    assert_one_segment(rolled.engine, rolled.recording.segments)
