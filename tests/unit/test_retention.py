"""Chat templates that keep thoughts: changed only where they do not, and only as far as it can be proven."""

import json

import pytest
from npm_tokenizers import tokenizer_dir

from dockyard.gateway.render.template import ChatTemplate, keeping_thoughts

ASKED = {"role": "user", "content": "2 + 2?"}
ANSWERED = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
KEEPS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% endfor %}"
)
DROPS = KEEPS.replace("{% if m.reasoning_content", "{% if CONDITION and m.reasoning_content")
NEVER = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def qwen3() -> str:
    return json.loads((tokenizer_dir("qwen3") / "tokenizer_config.json").read_text())["chat_template"]


def test_qwen3_is_made_to_keep_the_thoughts_of_earlier_turns():
    changed = keeping_thoughts(qwen3(), {})
    assert changed
    text = ChatTemplate(changed, {}).render([ASKED, ANSWERED, ASKED], prompt=True)
    assert text.count("<think>\ntwo and two\n</think>\n\n4<|im_end|>") == 1
    assert "two and two" not in ChatTemplate(qwen3(), {}).render([ASKED, ANSWERED, ASKED], prompt=True)


@pytest.mark.parametrize("condition", ["preserve_thinking", "(clear_thinking is defined and not clear_thinking)"])
def test_a_template_that_can_be_asked_to_keep_thoughts_is_asked(condition: str):
    changed = keeping_thoughts(DROPS.replace("CONDITION", condition), {})
    assert changed
    assert "two and two" in ChatTemplate(changed, {}).render([ASKED, ANSWERED, ASKED], prompt=True)


def test_a_template_that_keeps_thoughts_stays_as_it_is():
    assert keeping_thoughts(KEEPS, {}) == KEEPS


@pytest.mark.parametrize("source", [NEVER, DROPS.replace("CONDITION", "loop.last")])
def test_a_template_that_nothing_known_changes_is_said_to_be_one(source: str):
    assert keeping_thoughts(source, {}) is None


def test_a_change_that_would_also_change_other_prompts_is_not_taken():
    source = DROPS.replace("CONDITION", "preserve_thinking") + "{% if preserve_thinking %}!{% endif %}"
    assert keeping_thoughts(source, {}) is None
