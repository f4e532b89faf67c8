"""Conversations in words become tokens: what the whole template prints, with the model's own turns marked."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from converting import check_history, runs, said, turns
from gateway_fakes import CHATML, HERMES, tiny, write_model
from hypothesis import given, settings
from plain_jinja import plain_jinja
from tool_templates import BASH

from dockyard.convert.conversation import Conversation
from dockyard.convert.tokenize import segments_of
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.render.splice import without_tools
from dockyard.gateway.render.template import TemplateRejectionError
from dockyard.types import Message, Prompt, ToolCall

THINKER = HERMES.replace(
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
)
"""Hands over inside of a thought, as Qwen3-Thinking does; its histories show thoughts."""
FORGETFUL = THINKER.replace(
    "{% if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}", ""
)
"""Hands over inside of a thought and then shows none, as DeepSeek-R1 does."""
UNSPLICED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + (loop.index | string) }}"
    "{{ ' old' if m.role == 'assistant' and not loop.last else '' }}{{ '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' + (messages | length + 1) | string + '\n' }}{% endif %}"
)
"""Numbers its messages, so that none can be rendered alone, and marks old replies, so that no history goes on."""
ENDED = CHATML + "{% if not add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}"
"""Ends a history that nobody goes on with, as Phi-3 does."""


@cache
def renderer(template: str) -> Renderer:
    folder = Path(mkdtemp(prefix="dockyard-convert-"))
    return Renderer.load(write_model(folder, template, more_tokens=["<tool_call>", "</tool_call>"]))


def spoken(conversation: Conversation, of: Renderer) -> list[str]:
    """What is trained on, turn by turn."""
    segments = segments_of(conversation, of)
    return [text for segment in segments for sampled, text in runs(segment, of) if sampled]


def told(*messages: Message, sampled: set[int] | None = None, cut: Sequence[int] = ()) -> Conversation:
    return Conversation(messages=messages, sampled=None if sampled is None else frozenset(sampled), cut=frozenset(cut))


END = "<|im_end|>"
ASK, MORE = Message("user", "list the files"), Message("user", "count them")


def test_only_the_models_own_words_are_marked_with_the_token_that_ends_them():
    of = renderer(CHATML)
    [segment] = segments_of(told(Message("system", "Be brief."), ASK, said("ls"), MORE, said("wc")), of)
    assert runs(segment, of) == [
        (False, f"<|im_start|>system\nBe brief.{END}\n<|im_start|>user\nlist the files{END}\n<|im_start|>assistant\n"),
        (True, "ls<|im_end|>"),
        (False, "\n<|im_start|>user\ncount them<|im_end|>\n<|im_start|>assistant\n"),
        (True, "wc<|im_end|>"),
    ]
    assert (segment.logprobs, segment.versions) == (None, None)


def test_what_comes_after_the_last_reply_is_left_out():
    of = renderer(CHATML)
    assert (
        segments_of(told(ASK, said("ls"), MORE), of)[0].token_ids.tolist()
        == segments_of(told(ASK, said("ls")), of)[0].token_ids.tolist()
    )


def test_copied_replies_are_context():
    assert spoken(told(ASK, said("ls"), MORE, said("wc"), sampled={3}), renderer(CHATML)) == ["wc<|im_end|>"]
    assert segments_of(told(ASK, said("ls"), sampled=set()), renderer(CHATML)) == ()


def test_a_reply_that_the_token_limit_cut_has_no_end_of_its_own():
    of = renderer(CHATML)
    [segment] = segments_of(told(ASK, said("ls"), MORE, said("wc"), cut=[1]), of)
    assert [text for _, text in runs(segment, of)][1:3] == [
        "ls",
        "<|im_end|>\n<|im_start|>user\ncount them<|im_end|>\n<|im_start|>assistant\n",
    ]


def test_opening_system_texts_are_one_and_marks_stay_with_their_messages():
    messages = (Message("system", "Be brief."), Message("system", "Be kind."), ASK, said("ls"), MORE, said("wc"))
    of = renderer(CHATML)
    assert spoken(told(*messages, sampled={5}), of) == ["wc<|im_end|>"]
    [segment] = segments_of(told(*messages), of)
    assert runs(segment, of)[0][1].startswith("<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>")


def test_thoughts_are_part_of_what_was_said():
    assert spoken(told(ASK, said("ls", "Which?"), MORE, said("wc")), renderer(HERMES)) == [
        "<think>\nWhich?\n</think>\n\nls<|im_end|>",
        "wc<|im_end|>",
    ]


@pytest.mark.parametrize("text", ["<think>\nWhich?\n</think>\n\nls", "\nWhich?\n</think>\n\nls"])
def test_thoughts_that_were_left_in_the_text_are_thoughts_again(text: str):
    [segment] = segments_of(told(ASK, said(text)), renderer(HERMES))
    [expected] = segments_of(told(ASK, said("ls", "Which?")), renderer(HERMES))
    assert segment.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("text", ["see </think> and <think>", "so: <think>a</think>b"])
def test_a_reply_that_only_speaks_of_thoughts_keeps_its_words(text: str):
    of = renderer(HERMES)
    [segment] = segments_of(told(ASK, said(text)), of)
    assert spoken(told(ASK, said(text)), of) == [f"{text}<|im_end|>"]
    assert tiny().token_to_id("</think>") not in segment.token_ids.tolist()


@pytest.mark.parametrize("template", [THINKER, FORGETFUL])
def test_a_thought_that_the_prompt_begins_is_finished_by_the_model(template: str):
    of = renderer(template)
    [segment] = segments_of(told(ASK, said("ls", "Which?")), of)
    assert runs(segment, of)[0][1].endswith("<|im_start|>assistant\n<think>\n")
    assert runs(segment, of)[1] == (True, "Which?\n</think>\n\nls<|im_end|>")
    assert of.keeps_thoughts


def test_a_template_without_thoughts_says_so_and_leaves_them_out():
    assert not renderer(CHATML).keeps_thoughts
    assert spoken(told(ASK, said("ls", "Which?")), renderer(CHATML)) == ["ls<|im_end|>"]


def test_what_a_template_prints_behind_a_finished_history_was_not_said():
    assert spoken(told(ASK, said("ls"), MORE, said("wc")), renderer(ENDED)) == ["ls<|im_end|>", "wc<|im_end|>"]


def test_a_template_in_which_no_history_goes_on_from_another_gives_a_segment_for_each_reply():
    of = renderer(UNSPLICED)
    segments = segments_of(told(ASK, said("ls"), MORE, said("wc")), of)
    assert not of.rendering.splices
    assert [[text for sampled, text in runs(segment, of) if sampled] for segment in segments] == [
        ["ls<|im_end|>"],
        ["wc<|im_end|>"],
    ]
    assert "<|im_start|>assistant2 old\nls<|im_end|>" in runs(segments[1], of)[0][1]


def test_words_that_spell_a_control_token_are_only_words():
    of = renderer(CHATML)
    [segment] = segments_of(told(Message("user", "a<|im_end|>b"), said("c<|im_end|>d")), of)
    assert runs(segment, of)[1] == (True, "c<|im_end|>d<|im_end|>")
    assert segment.token_ids.tolist().count(tiny().token_to_id("<|im_end|>")) == 3


def test_replies_that_follow_each_other_each_have_a_prompt():
    of = renderer(CHATML)
    [segment] = segments_of(told(ASK, said("ls"), said("wc")), of)
    assert [text for _, text in runs(segment, of)][1:] == [
        "ls<|im_end|>",
        "\n<|im_start|>assistant\n",
        "wc<|im_end|>",
    ]


@pytest.mark.parametrize("messages", [(said("ls"),), (said("ls"), ASK, said("wc"))])
def test_a_conversation_that_the_model_begins_cannot_be_rendered(messages: tuple[Message, ...]):
    with pytest.raises(TemplateRejectionError, match="there is no message before"):
        segments_of(told(*messages), renderer(CHATML))


def test_a_reply_without_an_end_of_turn_cannot_be_rendered():
    template = CHATML.replace("'<|im_end|>' + '\n'", "'\n'")
    with pytest.raises(TemplateRejectionError, match="how the model ends"):
        segments_of(told(ASK, said("ls")), renderer(template))


def test_calls_in_a_template_without_tools_are_written_as_the_gateway_tells_the_model_to():
    call = ToolCall("c1", "bash", {"command": "ls"})
    conversation = Conversation(
        messages=(ASK, said("I look.", "", call), Message("tool", "a", call_id="c1"), said("One.")), tools=(BASH,)
    )
    of = renderer(CHATML)
    [segment] = segments_of(conversation, of)
    shown = runs(segment, of)
    assert "You may call these functions" in shown[0][1]
    assert shown[1] == (
        True,
        'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>',
    )
    assert "<tool_response>\na\n</tool_response>" in shown[2][1]


@settings(max_examples=40, deadline=None)
@given(turns(thoughts=True))
def test_a_conversation_is_what_the_whole_template_prints(messages: tuple[Message, ...]):
    check_history(Conversation(messages=messages, tools=(BASH,)), renderer(HERMES), plain_jinja(HERMES), END)


@settings(max_examples=30, deadline=None)
@given(turns(thoughts=False))
def test_in_a_template_without_tools_it_is_what_the_template_prints_of_plain_messages(messages: tuple[Message, ...]):
    plain = plain_jinja(CHATML)

    def in_words(told: Sequence[Message], tools: Sequence[dict[str, object]], prompt: bool) -> str:
        return plain(without_tools(Prompt(tuple(told), tuple(tools))).messages, (), prompt)

    check_history(Conversation(messages=messages, tools=(BASH,)), renderer(CHATML), in_words, END)
