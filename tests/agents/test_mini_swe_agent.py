"""mini-swe-agent over Chat Completions: it echoes verbatim, and drops turns without a call that it can run."""

from pathlib import Path

import pytest
from agent_clis import need
from agent_stories import STORY_END, TASK, Start, roll_out, tell
from scripted_policy import (
    Say,
    assert_one_segment,
    assert_trained_as_drawn,
    call,
    lines,
    tool_call,
    turn,
)

from dockyard.types import Finish


@pytest.fixture(autouse=True)
def installed() -> None:
    need("mini")


START: Start = lambda desk: desk.mini_swe_agent(TASK)  # noqa: E731
WRITE = turn("I write it.", call("bash", command="echo one > a.txt"), thought="Hm.")
SUBMIT = turn("Done.", call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))


async def test_six_calls_with_odd_json_are_one_segment(tmp_path: Path):
    rolled = await tell("mini-swe-agent", tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert rolled.read("hello.txt") == STORY_END
    assert len(rolled.engine.drawn) == 6
    assert_one_segment(rolled.engine, rolled.recording.segments)


async def test_malformed_and_cut_turns_that_it_drops_are_trained_in_segments_of_their_own(tmp_path: Path):
    broken = Say("Writing.\n" + tool_call('{"name": "bash", "arguments": {"command": "echo'))
    cut = Say("<think>\nI could go on for", finish=Finish.LENGTH)
    rolled = await roll_out(START, lines(WRITE, broken, cut, SUBMIT), tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert rolled.read("a.txt") == "one\n"
    assert len(rolled.engine.drawn) == 4
    assert len(rolled.recording.segments) == 3
    assert_trained_as_drawn(rolled.engine, rolled.recording.segments)


async def test_a_failing_engine_is_asked_again_and_leaves_no_trace(tmp_path: Path):
    rolled = await roll_out(START, lines(WRITE, RuntimeError("no memory"), SUBMIT), tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert len(rolled.engine.prompts) == 3
    assert len(rolled.engine.drawn) == 2
    assert_one_segment(rolled.engine, rolled.recording.segments)
