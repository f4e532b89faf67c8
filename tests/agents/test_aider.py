"""aider over Chat Completions without tools: it rewrites its history in every call, so no call continues another."""

from pathlib import Path

import pytest
from agent_clis import need
from agent_stories import STORY_END, tell
from scripted_policy import assert_trained_as_drawn


@pytest.fixture(autouse=True)
def installed() -> None:
    need("aider")


async def test_every_call_is_a_segment_of_its_own_and_trained_once(tmp_path: Path):
    rolled = await tell("aider", tmp_path)
    assert rolled.ran.code == 0, rolled.ran.output
    assert rolled.read("hello.txt") == STORY_END
    assert len(rolled.engine.drawn) == 6
    assert_trained_as_drawn(rolled.engine, rolled.recording.segments)
    assert len(rolled.recording.segments) == 6
