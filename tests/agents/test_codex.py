"""codex over OpenAI Responses: it echoes everything verbatim, and dies of what others survive."""

import re
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
    voices,
)

from dockyard.types import Finish


@pytest.fixture(autouse=True)
def installed() -> None:
    need("codex")


START: Start = lambda desk: desk.codex(TASK)  # noqa: E731
WRITE = turn("I write it.", call("exec_command", cmd="echo one > a.txt"), thought="Hm.")


async def test_seven_calls_with_odd_json_are_one_segment(tmp_path: Path):
    rolled = await tell("codex", tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert rolled.read("hello.txt") == STORY_END
    assert len(rolled.engine.drawn) == 7
    assert_one_segment(rolled.engine, rolled.recording.segments)


async def test_a_malformed_call_is_text_to_the_agent_and_still_trained(tmp_path: Path):
    broken = Say("Writing.\n" + tool_call('{"name": "exec_command", "arguments": {"cmd": "echo'))
    rolled = await roll_out(START, lines(WRITE, broken), tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert '{"cmd": "echo' in rolled.ran.output
    assert rolled.read("a.txt") == "one\n"
    assert len(rolled.engine.drawn) == 2
    assert_one_segment(rolled.engine, rolled.recording.segments)


async def test_a_cut_turn_does_not_kill_it(tmp_path: Path):
    cut = Say("<think>\nLong.\n</think>\n\nI could go on for", finish=Finish.LENGTH)
    rolled = await roll_out(START, lines(WRITE, cut), tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert rolled.ran.output.rstrip().endswith("I could go on for")
    assert_one_segment(rolled.engine, rolled.recording.segments)


async def test_a_failing_engine_is_asked_again_and_leaves_no_trace(tmp_path: Path):
    rolled = await roll_out(START, lines(WRITE, RuntimeError("no memory"), turn("Done.")), tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert len(rolled.engine.prompts) == 3
    assert_one_segment(rolled.engine, rolled.recording.segments)


async def test_it_compacts_before_its_context_is_full_and_every_part_is_trained(tmp_path: Path):
    long = turn("I look.", call("exec_command", cmd="seq 1 1500"))
    after = turn("Going on.", call("exec_command", cmd="echo two > b.txt"))
    summary = Say("I wrote a.txt.")
    script = voices(("CONTEXT CHECKPOINT", lines(summary)), main=lines(WRITE, long, after, turn("Done.")))
    rolled = await roll_out(lambda desk: desk.codex(TASK, context=32_768, compact_at=12_000), script, tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert (rolled.read("a.txt"), rolled.read("b.txt")) == ("one\n", "two\n")
    assert len(rolled.engine.drawn) == 5
    assert "I wrote a.txt." in rolled.engine.prompts[-1]
    assert_trained_as_drawn(rolled.engine, rolled.recording.segments)
    # The story; its summary, asked for without tools and so under another opening; the rest.
    assert len(rolled.recording.segments) == 3


async def test_a_subagent_is_a_segment_of_its_own(tmp_path: Path):
    def wait(prompt: str) -> Say:
        started = re.findall(r'"agent_id": ?"(.*?)"', prompt)
        return turn("I wait.", call("multi_agent_v1.wait_agent", targets=started, timeout_ms=60_000))

    ask = turn("I ask.", call("multi_agent_v1.spawn_agent", message="COUNT the files of this folder"))
    helper = lines(turn("", call("exec_command", cmd="ls > listing.txt")), turn("There is one.", thought="So."))
    main = lines(WRITE, ask, wait, turn("One file."))
    rolled = await roll_out(START, voices(("COUNT the files", helper), main=main), tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert "a.txt" in rolled.read("listing.txt")
    assert len(rolled.engine.drawn) == 6
    assert len(rolled.recording.segments) == 2
    assert_trained_as_drawn(rolled.engine, rolled.recording.segments)
