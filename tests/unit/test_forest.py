"""Recognising a returning history, and stitching what was recorded into the fewest segments."""

import numpy as np
import pytest

from dockyard.gateway.forest import Branch, Forest, Message, Plan
from dockyard.types import Finish, Segment, Turn

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


def call(forest: Forest, messages: list[Message], prompt: list[int], sampled: list[int], text: str = "a") -> Plan:
    plan = forest.plan(messages)
    forest.commit(plan, turn(prompt, sampled), text)
    return plan


def shown(segment: Segment) -> str:
    """`1 2 [3 4]`: sampled ids in brackets."""
    words = [f"[{i}]" if s else str(i) for i, s in zip(segment.token_ids, segment.sampled, strict=True)]
    return " ".join(words).replace("] [", " ")


def stitched(forest: Forest) -> list[str]:
    return [shown(segment) for segment in forest.stitch()[0]]


def one_turn() -> Forest:
    forest = Forest()
    call(forest, [SYSTEM, USER], [1, 2], [3, 4])
    return forest


def two_turns() -> Forest:
    forest = one_turn()
    call(forest, [SYSTEM, USER, said("a"), AGAIN], [1, 2, 3, 4, 5], [6], "b")
    return forest


def test_the_first_call_has_nothing_to_keep_and_is_no_branch():
    plan = Forest().plan([SYSTEM, USER])
    assert (plan.prefix, plan.new, plan.branch) == (None, (SYSTEM, USER), None)


@pytest.mark.parametrize("echo", ["a b", " a  b\n", "a\nb"])
def test_a_turn_echoed_with_other_whitespace_is_kept_as_sampled(echo: str):
    forest = Forest()
    call(forest, [SYSTEM, USER], [1, 2], [3, 4], "a b")
    plan = forest.plan([SYSTEM, USER, said(echo), AGAIN])
    assert plan.prefix is not None
    assert (plan.prefix.tolist(), plan.new, plan.branch) == ([1, 2, 3, 4], (AGAIN,), None)


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
    plan = two_turns().plan(messages)
    assert (None if plan.prefix is None else plan.prefix.tolist()) == kept
    assert plan.branch == branch


def test_of_two_turns_with_the_same_text_the_one_that_was_continued_is_found():
    forest = two_turns()
    call(forest, [SYSTEM, USER], [1, 2], [3, 3, 4])
    plan = forest.plan([SYSTEM, USER, said("a"), AGAIN, said("b"), USER])
    assert plan.prefix is not None
    assert plan.prefix.tolist() == [1, 2, 3, 4, 5, 6]


def test_of_two_turns_with_the_same_text_the_latest_is_kept():
    forest = one_turn()
    call(forest, [SYSTEM, USER], [1, 2], [3, 3, 4])
    plan = forest.plan([SYSTEM, USER, said("a"), AGAIN])
    assert plan.prefix is not None
    assert plan.prefix.tolist() == [1, 2, 3, 3, 4]


def test_a_conversation_that_only_grows_is_one_segment():
    assert stitched(two_turns()) == ["1 2 [3 4] 5 [6]"]


def test_a_segment_aligns_logprobs_and_versions_with_its_ids():
    forest = one_turn()
    forest.commit(forest.plan([SYSTEM, USER, said("a"), AGAIN]), turn([1, 2, 3, 4, 5], [6], version=7), "b")
    [segment], _ = forest.stitch()
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
    forest.commit(forest.plan([SYSTEM, USER, said("a"), AGAIN]).without_splice(), turn([1, 2, 3, 4, 5], [6]), "b")
    assert stitched(forest) == ["1 2 [3 4] 5 [6]"]
    assert forest.stitch()[1]["branch_unsafe"] == 1


def test_of_retries_that_nobody_continued_the_last_is_kept():
    forest = one_turn()
    call(forest, [SYSTEM, USER], [1, 2], [3, 9])
    call(forest, [SYSTEM, USER], [1, 2], [3])
    segments, stats = forest.stitch()
    assert [shown(segment) for segment in segments] == ["1 2 [3]"]
    assert stats["dropped_retries"] == 2


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


def test_a_turn_that_never_arrived_is_not_trained():
    forest = one_turn()
    forest.mark_undelivered(0)
    segments, stats = forest.stitch()
    assert (segments, stats["undelivered"]) == ((), 1)


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


def test_two_conversations_at_once_stay_apart():
    forest, other = one_turn(), Message("system", "subagent")
    call(forest, [other, USER], [7, 2], [3])
    call(forest, [SYSTEM, USER, said("a"), AGAIN], [1, 2, 3, 4, 5], [6])
    call(forest, [other, USER, said("a"), AGAIN], [7, 2, 3, 5], [8])
    assert stitched(forest) == ["1 2 [3 4] 5 [6]", "7 2 [3] 5 [8]"]


def test_the_counts_say_what_was_kept_and_what_was_encoded_again():
    forest = two_turns()
    call(forest, [SYSTEM, USER, AGAIN], [1, 2, 9, 9], [6])
    assert forest.stitch()[1] == {
        "prompt_tokens": 11,
        "sampled_tokens": 4,
        "splices": 1,
        "branch_dropped": 1,
        "reencoded_tokens": 2,
        "undelivered": 0,
        "dropped_retries": 0,
    }
