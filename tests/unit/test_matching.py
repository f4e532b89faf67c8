"""Recognising a returning history, and stitching what was recorded into the fewest segments."""

from dataclasses import replace

import numpy as np
import pytest

from dockyard.gateway.matching import Branch, PromptPlan, SessionHistory
from dockyard.types import Finish, Json, Message, Prompt, Segment, ToolCall, Turn

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


def call(
    history: SessionHistory, messages: list[Message], prompt: list[int], sampled: list[int], text: str = "a"
) -> PromptPlan:
    plan = planned(history, messages)
    history.commit(plan, turn(prompt, sampled), said(text))
    return plan


def planned(history: SessionHistory, messages: list[Message]) -> PromptPlan:
    return history.plan(Prompt(tuple(messages)))


def kept_ids(plan: PromptPlan) -> list[int] | None:
    return None if plan.prefix is None else np.concatenate(plan.prefix).tolist()


def shown(segment: Segment) -> str:
    """`1 2 [3 4]`: sampled ids in brackets."""
    words = [f"[{i}]" if s else str(i) for i, s in zip(segment.token_ids, segment.sampled, strict=True)]
    return " ".join(words).replace("] [", " ")


def stitched(history: SessionHistory) -> list[str]:
    return [shown(segment) for segment in history.stitch()[0].segments]


def one_turn() -> SessionHistory:
    history = SessionHistory()
    call(history, [SYSTEM, USER], [1, 2], [3, 4])
    return history


def two_turns() -> SessionHistory:
    history = one_turn()
    call(history, [SYSTEM, USER, said("a"), AGAIN], [1, 2, 3, 4, 5], [6], "b")
    return history


def test_the_first_call_has_nothing_to_keep_and_is_no_branch():
    plan = planned(SessionHistory(), [SYSTEM, USER])
    assert (plan.prefix, plan.new, plan.branch) == (None, (SYSTEM, USER), None)


@pytest.mark.parametrize("echo", ["a b", " a  b\n", "a\nb"])
def test_a_turn_echoed_with_other_whitespace_is_kept_as_sampled(echo: str):
    history = SessionHistory()
    call(history, [SYSTEM, USER], [1, 2], [3, 4], "a b")
    plan = planned(history, [SYSTEM, USER, said(echo), AGAIN])
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
    history = two_turns()
    call(history, [SYSTEM, USER], [1, 2], [3, 3, 4])
    plan = planned(history, [SYSTEM, USER, said("a"), AGAIN, said("b"), USER])
    assert kept_ids(plan) == [1, 2, 3, 4, 5, 6]


def test_of_two_turns_with_the_same_text_the_latest_is_kept():
    history = one_turn()
    call(history, [SYSTEM, USER], [1, 2], [3, 3, 4])
    plan = planned(history, [SYSTEM, USER, said("a"), AGAIN])
    assert kept_ids(plan) == [1, 2, 3, 3, 4]


def test_a_conversation_that_only_grows_is_one_segment():
    assert stitched(two_turns()) == ["1 2 [3 4] 5 [6]"]


def test_a_segment_aligns_logprobs_and_versions_with_its_ids():
    history = one_turn()
    history.commit(planned(history, [SYSTEM, USER, said("a"), AGAIN]), turn([1, 2, 3, 4, 5], [6], version=7), said("b"))
    [segment] = history.stitch()[0].segments
    assert segment.logprobs is not None
    assert segment.versions is not None
    assert segment.logprobs.tolist() == [0, 0, -3, -4, 0, -6]
    assert segment.versions.tolist() == [-1, -1, 0, 0, -1, 7]
    assert (segment.token_ids.dtype, segment.logprobs.dtype, segment.versions.dtype) == ("int32", "float32", "int32")


def test_a_turn_shared_by_two_branches_is_trained_in_the_earlier_only():
    history = two_turns()
    call(history, [SYSTEM, USER, said("a"), USER], [1, 2, 3, 4, 8], [9])
    assert stitched(history) == ["1 2 [3 4] 5 [6]", "1 2 3 4 8 [9]"]


def test_a_dropped_turn_keeps_its_own_segment():
    history = one_turn()
    call(history, [SYSTEM, USER, AGAIN], [1, 2, 5], [6])
    assert stitched(history) == ["1 2 [3 4]", "1 2 5 [6]"]


def test_a_render_that_happens_to_repeat_the_sampled_ids_is_the_same_segment():
    history = one_turn()
    history.commit(
        planned(history, [SYSTEM, USER, said("a"), AGAIN]).without_splice(), turn([1, 2, 3, 4, 5], [6]), said("b")
    )
    assert stitched(history) == ["1 2 [3 4] 5 [6]"]
    assert history.stitch()[1]["branch_unsafe"] == 1


def test_of_retries_that_nobody_continued_the_last_is_kept():
    history = one_turn()
    call(history, [SYSTEM, USER], [1, 2], [3, 9])
    call(history, [SYSTEM, USER], [1, 2], [3])
    assert stitched(history) == ["1 2 [3]"]
    assert history.stitch()[1]["dropped_retries"] == 2


def test_of_retries_the_continued_one_is_kept():
    history = one_turn()
    call(history, [SYSTEM, USER], [1, 2], [9], "z")
    call(history, [SYSTEM, USER, said("a"), AGAIN], [1, 2, 3, 4, 5], [6])
    assert stitched(history) == ["1 2 [3 4] 5 [6]"]
    assert history.stitch()[1]["dropped_retries"] == 1


def test_a_retry_that_begins_like_its_predecessor_is_not_its_continuation():
    history = one_turn()
    call(history, [SYSTEM, USER], [1, 2], [3, 4, 5])
    assert stitched(history) == ["1 2 [3 4 5]"]


def test_a_turn_that_ends_inside_another_can_be_continued():
    history = one_turn()
    call(history, [SYSTEM, USER], [1, 2], [3], "c")
    call(history, [SYSTEM, USER, said("c"), AGAIN], [1, 2, 3, 7], [8])
    assert stitched(history) == ["1 2 [3] 7 [8]"]


def test_what_ends_at_its_limit_of_tokens_is_told_of_unless_more_came():
    history = one_turn()
    assert history.stitch()[1]["cut_at_end"] == 0
    cut = replace(turn([1, 2, 3, 4, 5], [6]), finish=Finish.LENGTH)
    history.commit(planned(history, [SYSTEM, USER, said("a"), AGAIN]), cut, said("b"))
    assert history.stitch()[1]["cut_at_end"] == 1
    call(history, [SYSTEM, USER, said("a"), AGAIN, said("b"), AGAIN], [1, 2, 3, 4, 5, 6, 7], [8])
    assert history.stitch()[1]["cut_at_end"] == 0


def test_a_turn_that_never_arrived_is_not_trained():
    history = one_turn()
    history.mark_delivered(0, False)
    found, stats = history.stitch()
    assert (found.segments, stats["undelivered"]) == ((), 1)


def test_of_retries_the_last_that_arrived_is_kept():
    history = one_turn()
    call(history, [SYSTEM, USER], [1, 2], [9])
    history.mark_delivered(1, False)
    assert stitched(history) == ["1 2 [3 4]"]


def test_a_turn_whose_delivery_failed_but_which_comes_back_did_arrive():
    history = one_turn()
    history.mark_delivered(0, False)
    call(history, [SYSTEM, USER, said("a"), AGAIN], [1, 2, 3, 4, 5], [6])
    assert stitched(history) == ["1 2 [3 4] 5 [6]"]


def test_a_turn_whose_continuation_never_arrived_is_still_trained():
    history = two_turns()
    history.mark_delivered(1, False)
    assert stitched(history) == ["1 2 [3 4]"]
    assert history.stitch()[1]["undelivered"] == 1


def test_a_turn_that_the_agent_went_on_with_is_kept_before_its_retry_even_if_the_continuation_never_arrived():
    history = two_turns()
    history.mark_delivered(1, False)
    call(history, [SYSTEM, USER], [1, 2], [9], "z")
    assert stitched(history) == ["1 2 [3 4]"]
    assert history.stitch()[1]["dropped_retries"] == 1


def test_two_conversations_at_once_stay_apart():
    history, other = one_turn(), Message("user", "subagent")
    call(history, [SYSTEM, other], [7, 2], [3])
    call(history, [SYSTEM, USER, said("a"), AGAIN], [1, 2, 3, 4, 5], [6])
    call(history, [SYSTEM, other, said("a"), AGAIN], [7, 2, 3, 5], [8])
    assert stitched(history) == ["1 2 [3 4] 5 [6]", "7 2 [3] 5 [8]"]


def test_the_counts_say_what_was_kept_and_what_was_encoded_again():
    history = two_turns()
    call(history, [SYSTEM, USER, AGAIN], [1, 2, 9, 9], [6])
    assert history.stitch()[1] == {
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


def one_tool_call(tools: tuple[Json, ...] = TOOLS) -> SessionHistory:
    history = SessionHistory()
    history.commit(history.plan(Prompt((SYSTEM, USER), tools)), turn([1, 2], [3, 4]), CALLED)
    return history


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
    history = one_tool_call()
    plan = history.plan(Prompt((SYSTEM, Message("user", "summary"), CALLED, RESULT), TOOLS))
    assert (plan.prefix, plan.branch) == (None, Branch.MOVED)
    history.commit(plan, turn([1, 9, 3, 4, 7], [8]), said("b"))
    assert stitched(history) == ["1 2 [3 4]", "1 9 3 4 7 [8]"]


def test_other_tools_are_another_root():
    history = one_tool_call()
    plan = history.plan(Prompt((SYSTEM, USER, AGAIN), (*TOOLS, *TOOLS)))
    assert (plan.prefix, plan.branch) == (None, Branch.TOOLS)


def test_a_tool_result_for_another_call_is_another_message():
    history = one_tool_call()
    history.commit(history.plan(Prompt((SYSTEM, USER, CALLED, RESULT), TOOLS)), turn([1, 2, 3, 4, 5], [6]), said("b"))
    other = replace(RESULT, call_id="call_2")
    assert history.plan(Prompt((SYSTEM, USER, CALLED, other), TOOLS)).branch is Branch.FORK


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
    history = one_tool_call()
    history.commit(history.plan(prompt), turn([7, 8], [9]), said("b"))
    found, stats = history.stitch()
    assert [shown(segment) for segment in found.segments] == ["1 2 [3 4]", "7 8 [9]"][: 2 if trusted else 1]
    assert [shown(segment) for segment in found.untrusted] == ["7 8 [9]"][: 0 if trusted else 1]
    assert stats["untrusted_calls"] == (0 if trusted else 1)
    assert stats["trained_tokens"] == (3 if trusted else 2)


def test_a_subagent_that_compacts_its_history_is_still_the_policys():
    history, tools = one_tool_call(), (*TOOLS, *TOOLS)
    for opening, offered in (("Do: ls -la /tmp/some/folder", tools), ("summary", tools), ("summary", (*tools, *TOOLS))):
        prompt = Prompt((STRANGER, Message("user", opening)), offered)
        history.commit(history.plan(prompt), turn([7, 8], [9]), said("b"))
    assert history.stitch()[1]["untrusted_calls"] == 0


def test_a_side_call_before_the_first_real_one_does_not_pass_for_the_harness():
    history = SessionHistory()
    history.commit(history.plan(Prompt((STRANGER, USER), auxiliary=True)), turn([7], [9]), said("title"))
    history.commit(history.plan(Prompt((SYSTEM, USER), TOOLS)), turn([1, 2], [3]), CALLED)
    found, _ = history.stitch()
    assert [shown(segment) for segment in found.segments] == ["1 2 [3]"]


@pytest.mark.parametrize("probe", [Prompt((USER,)), Prompt((STRANGER, USER))])
def test_a_probe_before_the_first_call_with_tools_is_not_the_harness(probe: Prompt):
    history = SessionHistory()
    history.commit(history.plan(probe), turn([7], [9]), said("ok"))
    history.commit(history.plan(Prompt((SYSTEM, USER), TOOLS)), turn([1, 2], [3]), CALLED)
    longer = Prompt((SYSTEM, USER, CALLED, RESULT), TOOLS)
    history.commit(history.plan(longer), turn([1, 2, 3, 4], [5]), said("b"))
    found, stats = history.stitch()
    assert [shown(segment) for segment in found.segments] == ["1 2 [3] 4 [5]"]
    assert stats["untrusted_calls"] == 1


def test_a_harness_without_tools_that_has_gone_on_stays_the_harness():
    history = two_turns()
    history.commit(history.plan(Prompt((STRANGER, USER), TOOLS)), turn([7], [9]), said("b"))
    assert stitched(history) == ["1 2 [3 4] 5 [6]"]
