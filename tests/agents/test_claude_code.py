"""claude-code over Anthropic Messages: it sorts keys, fills in defaults, and changes the shape of what it echoes."""

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

from dockyard.types import Finish


@pytest.fixture(autouse=True)
def installed() -> None:
    need("claude")


START: Start = lambda desk: desk.claude_code(TASK)  # noqa: E731
BARE: Start = lambda desk: desk.claude_code(TASK, "--bare")  # noqa: E731
WRITE = turn("I write it.", call("Bash", command="echo one > a.txt"), thought="Hm.")


@pytest.mark.parametrize("name", ["claude-code", "claude-code --bare"])
async def test_seven_calls_with_odd_json_are_one_segment(name: str, tmp_path: Path):
    rolled = await tell(name, tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert rolled.read("hello.txt") == STORY_END
    assert len(rolled.engine.drawn) == 7
    assert_one_segment(rolled.engine, rolled.recording.segments)


async def test_a_malformed_call_is_text_to_the_agent_and_still_trained(tmp_path: Path):
    broken = Say("Writing.\n" + tool_call('{"name": "Bash", "arguments": {"command": "echo'))
    rolled = await roll_out(BARE, lines(WRITE, broken), tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert '{"command": "echo' in rolled.ran.output
    assert rolled.read("a.txt") == "one\n"
    assert len(rolled.engine.drawn) == 2
    assert_one_segment(rolled.engine, rolled.recording.segments)


async def test_it_resumes_a_cut_turn_in_the_same_segment(tmp_path: Path):
    cut = Say("<think>\nLong.\n</think>\n\nI could go on for", finish=Finish.LENGTH)
    rolled = await roll_out(BARE, lines(WRITE, cut, turn("Done.")), tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert len(rolled.engine.drawn) == 3
    assert "I could go on for<|im_end|>" in rolled.engine.prompts[-1]
    assert_one_segment(rolled.engine, rolled.recording.segments)


async def test_it_compacts_before_its_context_is_full_and_every_part_is_trained(tmp_path: Path):
    # It compacts at the window less its own output limit less 13,000; its first prompt has about 11,000.
    settings = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": "32768", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096"}
    long = turn("I look.", call("Bash", command="seq 1 1500"))
    after = turn("Going on.", call("Bash", command="echo two > b.txt"))
    summary = Say("<analysis>a</analysis>\n<summary>I wrote a.txt.</summary>")
    script = voices(("Respond with TEXT ONLY", lines(summary)), main=lines(WRITE, long, after, turn("Done.")))
    rolled = await roll_out(lambda desk: desk.claude_code(TASK, **settings), script, tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert (rolled.read("a.txt"), rolled.read("b.txt")) == ("one\n", "two\n")
    assert len(rolled.engine.drawn) == 5
    assert "I wrote a.txt." in rolled.engine.prompts[-1]
    assert_trained_as_drawn(rolled.engine, rolled.recording.segments)
    assert len(rolled.recording.segments) == 3


async def test_a_subagent_is_a_segment_of_its_own(tmp_path: Path):
    ask = call("Agent", description="count", prompt="COUNT the files of this folder", subagent_type="general-purpose")
    helper = lines(
        turn("", call("Bash", command="ls > listing.txt")), last_words(tmp_path, turn("There is one.", thought="So."))
    )
    # It runs in the background, and a main agent that is done first would end it.
    wait = call("Bash", command=UNTIL_LAST_WORDS)
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


async def test_a_turn_of_thoughts_alone_that_it_drops_is_a_segment_of_its_own(tmp_path: Path):
    rolled = await roll_out(BARE, lines(WRITE, Say("<think>\nHm.\n</think>\n\n"), turn("Done.")), tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert len(rolled.engine.drawn) == 3
    assert len(rolled.recording.segments) == 2
    assert_trained_as_drawn(rolled.engine, rolled.recording.segments)
