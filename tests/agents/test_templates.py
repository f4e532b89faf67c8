"""The same stories to a model that `renderers` does not know: Qwen2.5, spliced by its template alone."""

from pathlib import Path

import pytest
from agent_clis import need
from agent_stories import STORY_END, renderer, tell
from scripted_policy import ScriptedEngine, assert_one_segment, lines, tokenizer

AGENTS = {
    "qwen-code": "qwen",
    "claude-code": "claude",
    "claude-code --bare": "claude",
    "codex": "codex",
    "mini-swe-agent": "mini",
}


def test_the_two_models_take_the_two_ways_to_splice():
    assert renderer("qwen3").rendering.renderer.startswith("renderers:")
    assert renderer("qwen2_5").rendering.renderer == "template"


def test_the_scripted_policy_never_cuts_text_as_its_tokenizer_does():
    text = '<think>\nHm, é.\n</think>\n\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
    ids = ScriptedEngine(lines()).ids(text)
    assert ids != tokenizer().encode(text, add_special_tokens=False).ids
    assert tokenizer().decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", AGENTS)
async def test_a_story_is_one_segment_with_the_template_alone(name: str, tmp_path: Path):
    need(AGENTS[name])
    rolled = await tell(name, tmp_path, model="qwen2_5")
    assert rolled.ran.code == 0, rolled.ran.output
    assert rolled.read("hello.txt") == STORY_END
    assert len(rolled.engine.drawn) >= 6
    assert_one_segment(rolled.engine, rolled.recording.segments)
