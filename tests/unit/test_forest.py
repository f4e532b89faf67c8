"""Recognising a returning history, and stitching what was recorded into the fewest segments."""

from dataclasses import replace

import numpy as np
import pytest

from dockyard.gateway.matching import Branch, Forest, PromptPlan
from dockyard.gateway.messages import Message, Prompt, ToolCall
from dockyard.types import Finish, Json, Segment, Turn

SYSTEM, USER = Message("system", "s"), Message("user", "u")
AGAIN = Message("user", "again")


def said(text: str) -> Message:
    return Message("assistant", text)


def ints(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def turn(prompt: list[int], sampled: list[int], version: int = 0) -> Turn:
    """A turn whose logprobs are its ids, negated."""
    return Turn(
        prompt_ids=ints(*prompt),
        sampled_ids=ints(*sampled),
        logprobs=-ints(*sampled).astype(np.float32),
        versions=np.full(len(sampled), version, np.int32),
        finish=Finish.STOP,
    )


def call(forest: Forest, messages: list[Message], prompt: list[int], sampled: list[int], text: str = "a") -> PromptPlan:
    plan = planned(forest, messages)
    forest.commit(plan, turn(prompt, sampled), said(text))
    return plan


def planned(forest: Forest, messages: list[Message]) -> PromptPlan:
    return forest.plan(Prompt(tuple(messages)))


def kept_ids(plan: PromptPlan) -> list[int] | None:
    return None if plan.prefix is None else np.concatenate(plan.prefix).tolist()


def shown(segment: Segment) -> str:
    """`1 2 [3 4]`: sampled ids in brackets."""
    words = [f"[{i}]" if s else str(i) for i, s in zip(segment.token_ids, segment.sampled, strict=True)]
    return " ".join(words).replace("] [", " ")


def stitched(forest: Forest) -> list[str]:
    return [shown(segment) for segment in forest.stitch()[0].segments]


def one_turn() -> Forest:
    forest = Forest()
    call(forest, [SYSTEM, USER], [1, 2], [3, 4])
    return forest


def two_turns() -> Forest:
    forest = one_turn()
    call(forest, [SYSTEM, USER, said("a"), AGAIN], [1, 2, 3, 4, 5], [6], "b")
    return forest


def test_the_first_call_has_nothing_to_keep_and_is_no_branch():
    plan = planned(Forest(), [SYSTEM, USER])
    assert (plan.prefix, plan.new, plan.branch) == (None, (SYSTEM, USER), None)


@pytest.mark.parametrize("echo", ["a b", " a  b\n", "a\nb"])
def test_a_turn_echoed_with_other_whitespace_is_kept_as_sampled(echo: str):
    forest = Forest()
    call(forest, [SYSTEM, USER], [1, 2], [3, 4], "a b")
    plan = planned(forest, [SYSTEM, USER, said(echo), AGAIN])
    assert (kept_ids(plan), plan.new, plan.branch) == ([1, 2, 3, 4], (AGAIN,), None)


@pytest.mark.parametrize(
    ("messages", "kept", "branch"),
    [
        ([Message("system", "t"), USER], None, Branch.ROOT),
        ([SYSTEM, Message("user", " u")], None, Branch.REWRITTEN),
        ([SYSTEM, USER], None, Branch.RETRY),
        ([SYSTEM, USER, AGAIN], None, Branch.DROPPED),
        ([SYSTEM, USER, said("z"), AGAIN], None, Branch.EDITED),
        ([SYSTEM, USER, said("a"), AGAIN], [1, 2, 3, 4], Branch.RETRY),
        ([SYSTEM, USER, said("a"), Message("user", "other")], [1, 2, 3, 4], Branch.FORK),
        ([SYSTEM, USER, said("a"), AGAIN, said("z"), USER], [1, 2, 3, 4], Branch.EDITED),
        ([SYSTEM, USER, said("a"), AGAIN, USER], [1, 2, 3, 4], Branch.DROPPED),
        ([SYSTEM, USER, said("a"), AGAIN, said("b")], [1, 2, 3, 4, 5, 6], None),
        ([SYSTEM, USER, said("a"), AGAIN, said("b"), USER], [1, 2, 3, 4, 5, 6], None),
        ([SYSTEM, USER, said("a"), AGAIN, said("b"), said("z")], [1, 2, 3, 4, 5, 6], Branch.FOREIGN),
        ([SYSTEM, USER, said("a"), AGAIN, said("b"), USER, said("z"), USER], [1, 2, 3, 4, 5, 6], Branch.FOREIGN),
    ],
)
def test_what_the_agent_did_to_its_history_is_named(messages: list[Message], kept: list[int] | None, branch: Branch):
    plan = planned(two_turns(), messages)
    assert kept_ids(plan) == kept
    assert plan.branch == branch


def test_of_two_turns_with_the_same_text_the_one_that_was_continued_is_found():
    forest = two_turns()
    call(forest, [SYSTEM, USER], [1, 2], [3, 3, 4])
    plan = planned(forest, [SYSTEM, USER, said("a"), AGAIN, said("b"), USER])
    assert kept_ids(plan) == [1, 2, 3, 4, 5, 6]


def test_of_two_turns_with_the_same_text_the_latest_is_kept():
    forest = one_turn()
    call(forest, [SYSTEM, USER], [1, 2], [3, 3, 4])
    plan = planned(forest, [SYSTEM, USER, said("a"), AGAIN])
    assert kept_ids(plan) == [1, 2, 3, 3, 4]


def test_a_conversation_that_only_grows_is_one_segment():
    assert stitched(two_turns()) == ["1 2 [3 4] 5 [6]"]


def test_a_segment_aligns_logprobs_and_versions_with_its_ids():
    forest = one_turn()
    forest.commit(planned(forest, [SYSTEM, USER, said("a"), AGAIN]), turn([1, 2, 3, 4, 5], [6], version=7), said("b"))
    [segment] = forest.stitch()[0].segments
    assert segment.logprobs is not None
    assert segment.versions is not None
    assert segment.logprobs.tolist() == [0, 0, -3, -4, 0, -6]
    assert segment.versions.tolist() == [-1, -1, 0, 0, -1, 7]
    assert (segment.token_ids.dtype, segment.logprobs.dtype, segment.versions.dtype) == ("int32", "float32", "int32")


def test_a_turn_shared_by_two_branches_is_trained_in_the_earlier_only():
    forest = two_turns()
    call(forest, [SYSTEM, USER, said("a"), USER], [1, 2, 3, 4, 8], [9])
    assert stitched(forest) == ["1 2 [3 4] 5 [6]", "1 2 3 4 8 [9]"]


def test_a_dropped_turn_keeps_its_own_segment():
    forest = one_turn()
    call(forest, [SYSTEM, USER, AGAIN], [1, 2, 5], [6])
    assert stitched(forest) == ["1 2 [3 4]", "1 2 5 [6]"]


def test_a_render_that_happens_to_repeat_the_sampled_ids_is_the_same_segment():
    forest = one_turn()
    forest.commit(
        planned(forest, [SYSTEM, USER, said("a"), AGAIN]).without_splice(), turn([1, 2, 3, 4, 5], [6]), said("b")
    )
    assert stitched(forest) == ["1 2 [3 4] 5 [6]"]
    assert forest.stitch()[1]["branch_unsafe"] == 1


def test_of_retries_that_nobody_continued_the_last_is_kept():
    forest = one_turn()
    call(forest, [SYSTEM, USER], [1, 2], [3, 9])
    call(forest, [SYSTEM, USER], [1, 2], [3])
    assert stitched(forest) == ["1 2 [3]"]
    assert forest.stitch()[1]["dropped_retries"] == 2


def test_of_retries_the_continued_one_is_kept():
    forest = one_turn()
    call(forest, [SYSTEM, USER], [1, 2], [9], "z")
    call(forest, [SYSTEM, USER, said("a"), AGAIN], [1, 2, 3, 4, 5], [6])
    assert stitched(forest) == ["1 2 [3 4] 5 [6]"]
    assert forest.stitch()[1]["dropped_retries"] == 1


def test_a_retry_that_begins_like_its_predecessor_is_not_its_continuation():
    forest = one_turn()
    call(forest, [SYSTEM, USER], [1, 2], [3, 4, 5])
    assert stitched(forest) == ["1 2 [3 4 5]"]


def test_a_turn_that_ends_inside_another_can_be_continued():
    forest = one_turn()
    call(forest, [SYSTEM, USER], [1, 2], [3], "c")
    call(forest, [SYSTEM, USER, said("c"), AGAIN], [1, 2, 3, 7], [8])
    assert stitched(forest) == ["1 2 [3] 7 [8]"]


def test_what_ends_at_its_limit_of_tokens_is_told_of_unless_more_came():
    forest = one_turn()
    assert forest.stitch()[1]["cut_at_end"] == 0
    cut = replace(turn([1, 2, 3, 4, 5], [6]), finish=Finish.LENGTH)
    forest.commit(planned(forest, [SYSTEM, USER, said("a"), AGAIN]), cut, said("b"))
    assert forest.stitch()[1]["cut_at_end"] == 1
    call(forest, [SYSTEM, USER, said("a"), AGAIN, said("b"), AGAIN], [1, 2, 3, 4, 5, 6, 7], [8])
    assert forest.stitch()[1]["cut_at_end"] == 0


def test_a_turn_that_never_arrived_is_not_trained():
    forest = one_turn()
    forest.mark_undelivered(0)
    found, stats = forest.stitch()
    assert (found.segments, stats["undelivered"]) == ((), 1)


def test_of_retries_the_last_that_arrived_is_kept():
    forest = one_turn()
    call(forest, [SYSTEM, USER], [1, 2], [9])
    forest.mark_undelivered(1)
    assert stitched(forest) == ["1 2 [3 4]"]


def test_a_turn_whose_delivery_failed_but_which_comes_back_did_arrive():
    forest = one_turn()
    forest.mark_undelivered(0)
    call(forest, [SYSTEM, USER, said("a"), AGAIN], [1, 2, 3, 4, 5], [6])
    assert stitched(forest) == ["1 2 [3 4] 5 [6]"]


def test_a_turn_whose_continuation_never_arrived_is_still_trained():
    forest = two_turns()
    forest.mark_undelivered(1)
    assert stitched(forest) == ["1 2 [3 4]"]
    assert forest.stitch()[1]["undelivered"] == 1


def test_a_turn_that_the_agent_went_on_with_is_kept_before_its_retry_even_if_the_continuation_never_arrived():
    forest = two_turns()
    forest.mark_undelivered(1)
    call(forest, [SYSTEM, USER], [1, 2], [9], "z")
    assert stitched(forest) == ["1 2 [3 4]"]
    assert forest.stitch()[1]["dropped_retries"] == 1


def test_two_conversations_at_once_stay_apart():
    forest, other = one_turn(), Message("user", "subagent")
    call(forest, [SYSTEM, other], [7, 2], [3])
    call(forest, [SYSTEM, USER, said("a"), AGAIN], [1, 2, 3, 4, 5], [6])
    call(forest, [SYSTEM, other, said("a"), AGAIN], [7, 2, 3, 5], [8])
    assert stitched(forest) == ["1 2 [3 4] 5 [6]", "7 2 [3] 5 [8]"]


def test_the_counts_say_what_was_kept_and_what_was_encoded_again():
    forest = two_turns()
    call(forest, [SYSTEM, USER, AGAIN], [1, 2, 9, 9], [6])
    assert forest.stitch()[1] == {
        "cut_at_end": 0,
        "prompt_tokens": 11,
        "sampled_tokens": 4,
        "splices": 1,
        "branch_dropped": 1,
        "reencoded_tokens": 2,
        "undelivered": 0,
        "dropped_retries": 0,
        "untrusted_calls": 0,
        "trained_tokens": 4,
    }


SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "all": {"type": "boolean", "default": False}}}
TOOLS = ({"type": "function", "function": {"name": "bash", "description": "", "parameters": SCHEMA}},)
CALLED = Message(
    "assistant", "I look.", "hm", (ToolCall("call_1", "bash", {"command": "ls -la /tmp/some/folder", "limit": 5.0}),)
)
RESULT = Message("tool", "a.txt", call_id="call_1")


def one_tool_call(tools: tuple[Json, ...] = TOOLS) -> Forest:
    forest = Forest()
    forest.commit(forest.plan(Prompt((SYSTEM, USER), tools)), turn([1, 2], [3, 4]), CALLED)
    return forest


def echoed(**changes: object) -> Message:
    return replace(CALLED, **changes)  # pyright: ignore[reportArgumentType]


def with_arguments(arguments: Json, name: str = "bash") -> Message:
    return echoed(calls=(ToolCall("call_1", name, arguments),))


@pytest.mark.parametrize(
    "echo",
    [
        CALLED,
        with_arguments({"limit": 5, "command": "ls -la /tmp/some/folder"}),
        with_arguments({"command": "ls -la /tmp/some/folder", "limit": 5.0, "all": False}),
        echoed(reasoning=""),
        echoed(reasoning=" hm\n"),
        echoed(text="I  look.\n"),
        echoed(text=""),
    ],
    ids=["verbatim", "reordered", "defaults filled in", "no thoughts", "trimmed thoughts", "re-wrapped", "no text"],
)
def test_a_turn_is_known_by_its_call_ids_however_its_agent_writes_it(echo: Message):
    plan = one_tool_call().plan(Prompt((SYSTEM, USER, echo, RESULT), TOOLS))
    assert (kept_ids(plan), plan.calls, plan.new, plan.branch) == ([1, 2, 3, 4], CALLED.calls, (RESULT,), None)


@pytest.mark.parametrize(
    "echo",
    [
        with_arguments({"command": "ls"}),
        with_arguments({"command": "ls -la /tmp/some/folder", "limit": 5.0, "all": True}),
        with_arguments({"command": "ls -la /tmp/some/folder", "limit": 5.0}, name="sh"),
        echoed(text="I never said so."),
        echoed(reasoning="nor thought so"),
    ],
    ids=["arguments", "not the default", "name", "text", "thoughts"],
)
def test_a_turn_whose_content_changed_is_edited_even_if_its_ids_are_known(echo: Message):
    plan = one_tool_call().plan(Prompt((SYSTEM, USER, echo, RESULT), TOOLS))
    assert (plan.prefix, plan.branch) == (None, Branch.EDITED)


def test_a_turn_that_comes_back_in_another_history_is_context_there():
    forest = one_tool_call()
    plan = forest.plan(Prompt((SYSTEM, Message("user", "summary"), CALLED, RESULT), TOOLS))
    assert (plan.prefix, plan.branch) == (None, Branch.MOVED)
    forest.commit(plan, turn([1, 9, 3, 4, 7], [8]), said("b"))
    assert stitched(forest) == ["1 2 [3 4]", "1 9 3 4 7 [8]"]


def test_other_tools_are_another_root():
    forest = one_tool_call()
    plan = forest.plan(Prompt((SYSTEM, USER, AGAIN), (*TOOLS, *TOOLS)))
    assert (plan.prefix, plan.branch) == (None, Branch.TOOLS)


def test_a_tool_result_for_another_call_is_another_message():
    forest = one_tool_call()
    forest.commit(forest.plan(Prompt((SYSTEM, USER, CALLED, RESULT), TOOLS)), turn([1, 2, 3, 4, 5], [6]), said("b"))
    other = replace(RESULT, call_id="call_2")
    assert forest.plan(Prompt((SYSTEM, USER, CALLED, other), TOOLS)).branch is Branch.FORK


STRANGER = Message("system", "stranger")


@pytest.mark.parametrize(
    ("prompt", "trusted"),
    [
        (Prompt((SYSTEM, Message("user", "summary")), TOOLS), True),
        (Prompt((SYSTEM, Message("user", "compact it")), ()), True),
        (Prompt((Message("system", "plan mode"), USER), TOOLS), True),
        (Prompt((STRANGER, Message("user", "Do: ls -la /tmp/some/folder")), (*TOOLS, *TOOLS)), True),
        (Prompt((STRANGER, Message("user", "Do: ls -la /tmp/some/folder")), ()), False),
        (Prompt((STRANGER, USER), (*TOOLS, *TOOLS)), False),
        (Prompt((STRANGER, USER)), False),
        (Prompt((USER,)), False),
        (Prompt((SYSTEM, USER), auxiliary=True), False),
    ],
    ids=[
        "compacted",
        "compacting without tools",
        "other system text",
        "subagent with a prompt of the policy's",
        "the same without tools",
        "other tools",
        "stranger",
        "no system text",
        "side call",
    ],
)
def test_only_calls_that_show_the_harness_are_trained(prompt: Prompt, trusted: bool):
    forest = one_tool_call()
    forest.commit(forest.plan(prompt), turn([7, 8], [9]), said("b"))
    found, stats = forest.stitch()
    assert [shown(segment) for segment in found.segments] == ["1 2 [3 4]", "7 8 [9]"][: 2 if trusted else 1]
    assert [shown(segment) for segment in found.untrusted] == ["7 8 [9]"][: 0 if trusted else 1]
    assert stats["untrusted_calls"] == (0 if trusted else 1)
    assert stats["trained_tokens"] == (3 if trusted else 2)


def test_a_subagent_that_compacts_its_history_is_still_the_policys():
    forest, tools = one_tool_call(), (*TOOLS, *TOOLS)
    for opening, offered in (("Do: ls -la /tmp/some/folder", tools), ("summary", tools), ("summary", (*tools, *TOOLS))):
        prompt = Prompt((STRANGER, Message("user", opening)), offered)
        forest.commit(forest.plan(prompt), turn([7, 8], [9]), said("b"))
    assert forest.stitch()[1]["untrusted_calls"] == 0


def test_a_side_call_before_the_first_real_one_does_not_pass_for_the_harness():
    forest = Forest()
    forest.commit(forest.plan(Prompt((STRANGER, USER), auxiliary=True)), turn([7], [9]), said("title"))
    forest.commit(forest.plan(Prompt((SYSTEM, USER), TOOLS)), turn([1, 2], [3]), CALLED)
    found, _ = forest.stitch()
    assert [shown(segment) for segment in found.segments] == ["1 2 [3]"]


@pytest.mark.parametrize("probe", [Prompt((USER,)), Prompt((STRANGER, USER))])
def test_a_probe_before_the_first_call_with_tools_is_not_the_harness(probe: Prompt):
    forest = Forest()
    forest.commit(forest.plan(probe), turn([7], [9]), said("ok"))
    forest.commit(forest.plan(Prompt((SYSTEM, USER), TOOLS)), turn([1, 2], [3]), CALLED)
    history = Prompt((SYSTEM, USER, CALLED, RESULT), TOOLS)
    forest.commit(forest.plan(history), turn([1, 2, 3, 4], [5]), said("b"))
    found, stats = forest.stitch()
    assert [shown(segment) for segment in found.segments] == ["1 2 [3] 4 [5]"]
    assert stats["untrusted_calls"] == 1


def test_a_harness_without_tools_that_has_gone_on_stays_the_harness():
    forest = two_turns()
    forest.commit(forest.plan(Prompt((STRANGER, USER), TOOLS)), turn([7], [9]), said("b"))
    assert stitched(forest) == ["1 2 [3 4] 5 [6]"]
