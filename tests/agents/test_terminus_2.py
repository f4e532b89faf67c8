"""terminus-2, Harbor's own agent: Chat Completions without tools, through a whole Harbor trial in a sandbox."""

from pathlib import Path

import pytest
from agent_stories import STORY_END, served, terminus_2
from scripted_policy import Say, ScriptedEngine, assert_one_segment, assert_trained_as_drawn, lines, turn
from terminus_trial import attempt
from trials import skip_without_terminals

from dockyard.engine.protocol import ContextOverflow
from dockyard.types import Finish

pytestmark = pytest.mark.filterwarnings("default")  # of litellm's many parts


@pytest.fixture(autouse=True)
def installed() -> None:
    skip_without_terminals()


@pytest.mark.parametrize("echoed", [False, True], ids=["thoughts dropped", "thoughts echoed"])
async def test_eight_calls_are_one_segment(echoed: bool, tmp_path: Path):
    engine = ScriptedEngine(lines(*terminus_2()))
    async with served(engine) as gateway:
        rollout = await attempt(gateway, tmp_path, STORY_END, interleaved_thinking=echoed)
    assert (rollout.reward, rollout.failure) == (1.0, None)
    assert len(engine.drawn) == 8
    assert_one_segment(engine, rollout.segments)


async def test_malformed_and_cut_answers_stay_in_the_segment(tmp_path: Path):
    write, *_, done = terminus_2()
    broken = turn('{"analysis": "a", "plan": "p", "commands": [{"keystrokes": "ls', thought="Hm.")
    cut = Say('<think>\nLong.\n</think>\n\n{"analysis": "I could go on', finish=Finish.LENGTH)
    engine = ScriptedEngine(lines(write, broken, cut, done, done))
    async with served(engine) as gateway:
        rollout = await attempt(gateway, tmp_path, "café")
    assert (rollout.reward, rollout.failure) == (1.0, None)
    assert len(engine.drawn) == 5
    assert_one_segment(engine, rollout.segments)


async def test_an_overflow_makes_it_summarise_and_every_part_is_trained(tmp_path: Path):
    write, look, *_, done = terminus_2()
    full = ContextOverflow(prompt_tokens=99_999, context_length=20_000)
    summary = [turn("I wrote it.", thought="Hm."), turn("What is left?"), turn("Nothing.")]
    engine = ScriptedEngine(lines(write, look, full, *summary, done, done))
    async with served(engine) as gateway:
        rollout = await attempt(gateway, tmp_path, "café", enable_summarize=True)
    assert (rollout.reward, rollout.failure) == (1.0, None)
    assert len(engine.drawn) == 7
    assert_trained_as_drawn(engine, rollout.segments)
    # The story with its summary and the answers; the questions, asked by one who has not seen it; the rest.
    assert len(rollout.segments) == 3
