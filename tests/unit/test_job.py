"""Finished Harbor jobs read from disk: rewards, blame as far as it can be known, tokens where the agent kept them."""

from pathlib import Path
from typing import Any

import pytest
from finished_jobs import RAN, raised, write_trial
from hypothesis import given
from hypothesis import strategies as st

from dockyard.errors import DockyardError
from dockyard.gateway.token_tree import stitch_turns
from dockyard.rollout.job import num_turns, read_job, segments_of, stored_turn
from dockyard.types import Blame, Rollout, Segment, Turn


def only(job: Path) -> Rollout:
    [rollout] = read_job(job)
    return rollout


def test_attempts_of_a_task_are_numbered_in_the_order_they_began(tmp_path: Path):
    job = tmp_path / "job"
    write_trial(job, "b__1", reward=0.25)
    write_trial(job, "a__2", reward=0.5, started_at="2026-01-01T00:00:02Z")
    write_trial(job, "a__3", reward=0.75, started_at="2026-01-01T00:00:01Z")
    (job / "config.json").write_text("{}")
    assert [(one.task, one.attempt, one.reward) for one in read_job(job)] == [
        ("a", 0, 0.75),
        ("a", 1, 0.5),
        ("b", 0, 0.25),
    ]


def test_the_kind_is_that_of_the_tasks_folder_as_long_as_it_is_there(tmp_path: Path):
    for file, text in (("task.toml", '[metadata]\nkind = "write"\n'), ("instruction.md", ""), ("tests/test.sh", "")):
        path = tmp_path / "tasks" / "a" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    write_trial(tmp_path / "job", "a__1")
    write_trial(tmp_path / "job", "b__1")
    assert [one.kind for one in read_job(tmp_path / "job")] == ["write", ""]


def test_what_the_agent_counted_is_kept_and_seconds_are_those_of_the_phases(tmp_path: Path):
    write_trial(tmp_path, "a__1", agent_result={"n_input_tokens": 70, "n_output_tokens": 9})
    rollout = only(tmp_path)
    assert rollout.stats == {"calls": 1, "prompt_tokens": 70, "sampled_tokens": 9, "trained_tokens": 0}
    assert (rollout.seconds, rollout.segments) == ({"agent": 2.0, "total": 4.0}, ())


@pytest.mark.parametrize(
    ("more", "cause", "blame", "reward"),
    [
        ({"reward": 0.5, "exception_info": raised("AgentTimeoutError")}, "agent_timeout", Blame.POLICY, 0.5),
        ({"reward": None, "exception_info": raised("AgentTimeoutError")}, "agent_timeout", Blame.POLICY, 0.0),
        ({"exception_info": raised("NonZeroAgentExitCodeError")}, "agent_crash", Blame.POLICY, 1.0),
        (
            {"exception_info": raised("NonZeroAgentExitCodeError"), "agent_result": {"n_output_tokens": 0}},
            "agent_crash",
            Blame.INFRASTRUCTURE,
            None,
        ),
        ({"exception_info": raised("ApiRateLimitError")}, "engine_failed", Blame.INFRASTRUCTURE, None),
        (
            {"reward": None, "agent_execution": None, "exception_info": raised("RuntimeError")},
            "setup_error",
            Blame.INFRASTRUCTURE,
            None,
        ),
        ({"agent": "oracle", "exception_info": raised("RuntimeError")}, "setup_error", Blame.INFRASTRUCTURE, None),
        ({"exception_info": raised("CancelledError")}, "cancelled", Blame.INFRASTRUCTURE, None),
        (
            {"step_results": [{"step_name": "s", "exception_info": raised("AgentTimeoutError")}]},
            "agent_timeout",
            Blame.POLICY,
            1.0,
        ),
    ],
)
def test_blame_follows_the_same_table_as_for_rollouts_of_our_own(
    tmp_path: Path, more: dict[str, Any], cause: str, blame: Blame, reward: float | None
):
    write_trial(tmp_path, "a__1", **more)
    rollout = only(tmp_path)
    assert rollout.failure is not None
    assert (rollout.failure.cause, rollout.failure.blame, rollout.reward) == (cause, blame, reward)


def test_a_trial_that_was_never_finished_or_is_unreadable_is_lost_alone(tmp_path: Path):
    write_trial(tmp_path, "a__1")
    (write_trial(tmp_path, "b__1") / "result.json").unlink()
    broken = write_trial(tmp_path, "c__1") / "result.json"
    broken.write_text(broken.read_text().replace("task_id", "tas[REDACTED]_id"))
    rollouts = read_job(tmp_path)
    assert [(one.task, one.reward, one.failure and one.failure.cause) for one in rollouts] == [
        ("a", 1.0, None),
        ("b", None, "cancelled"),
        ("c", None, "host_error"),
    ]


def test_one_trial_may_be_named_instead_of_its_job(tmp_path: Path):
    folder = write_trial(tmp_path, "a__1")
    (folder / "trial.log").touch()
    assert only(folder).reward == 1.0


def test_a_folder_without_trials_is_an_error(tmp_path: Path):
    with pytest.raises(DockyardError, match="contains no trials"):
        read_job(tmp_path)
    with pytest.raises(DockyardError, match="is not a folder"):
        read_job(tmp_path / "none")


def shown(segment: Segment) -> tuple[list[int], list[int], list[float] | None]:
    logprobs = None if segment.logprobs is None else segment.logprobs.tolist()
    return segment.token_ids.tolist(), segment.token_ids[segment.sampled].tolist(), logprobs


def test_turns_that_go_on_from_one_another_are_one_segment():
    detail: Any = {
        "prompt_token_ids": [[1, 2], [1, 2, 10, 11, 3]],
        "completion_token_ids": [[10, 11], [12]],
        "logprobs": [[-1.0, -2.0], [-3.0]],
    }
    [segment] = segments_of([detail])
    assert shown(segment) == ([1, 2, 10, 11, 3, 12], [10, 11, 12], [0, 0, -1, -2, 0, -3])
    assert segment.versions is None
    assert num_turns([detail]) == 2


def test_a_history_that_was_rewritten_begins_a_new_segment():
    detail: Any = {
        "prompt_token_ids": [[1, 2], [1, 2, 99, 3], [1, 2, 99, 3, 12, 4]],
        "completion_token_ids": [[10, 11], [12], [13]],
        "logprobs": [[-1.0, -2.0], [-3.0], [-4.0]],
    }
    assert [shown(segment)[:2] for segment in segments_of([detail])] == [
        ([1, 2, 10, 11], [10, 11]),
        ([1, 2, 99, 3, 12, 4, 13], [12, 13]),
    ]


def test_text_of_a_turn_that_is_missing_is_not_marked_as_sampled():
    detail: Any = {"prompt_token_ids": [[1], [1, 10, 2, 77, 78, 3]], "completion_token_ids": [[10], [11]]}
    [segment] = segments_of([detail])
    assert shown(segment) == ([1, 10, 2, 77, 78, 3, 11], [10, 11], None)


@pytest.mark.parametrize("logprobs", [[[-1.0]], [[-1.0], [-2.0, -3.0]], [[-1.0], [float("nan")]]])
def test_logprobs_that_do_not_fit_their_tokens_are_not_used(logprobs: list[list[float]]):
    detail: Any = {"prompt_token_ids": [[1], [1, 10, 2]], "completion_token_ids": [[10], [11]], "logprobs": logprobs}
    [segment] = segments_of([detail])
    assert segment.logprobs is None


def test_answers_that_cannot_be_told_apart_give_no_segment():
    detail: Any = {"prompt_token_ids": [[1], [1, 10, 2]], "completion_token_ids": [[10]]}
    assert segments_of([detail]) == ()
    assert num_turns([detail]) == 2


ids = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@st.composite
def linear_turns(draw: st.DrawFn) -> list[Turn]:
    """Each prompt continues the turn before it, or begins a history of its own."""
    turns: list[Turn] = []
    before: list[int] = []
    for number in range(draw(st.integers(1, 8))):
        continues = draw(st.booleans())
        prompt = [*(before if continues else [10 + number]), *draw(ids)]
        sampled = draw(ids)
        logprobs = draw(st.none() | st.just([-0.5] * len(sampled)))
        turns.append(stored_turn(prompt, sampled, logprobs))
        before = prompt + sampled
    return turns


def joined_in_order(turns: list[Turn]) -> list[tuple[list[int], list[int], list[float] | None]]:
    """Segments by comparing each prompt with the turn before it only."""
    runs: list[list[Turn]] = []
    for turn in turns:
        before = [*runs[-1][-1].prompt_ids, *runs[-1][-1].sampled_ids] if runs else None
        if before is None or turn.prompt_ids[: len(before)].tolist() != before:
            runs.append([])
        runs[-1].append(turn)
    return [joined(run) for run in runs]


def joined(run: list[Turn]) -> tuple[list[int], list[int], list[float] | None]:
    whole = [*run[-1].prompt_ids.tolist(), *run[-1].sampled_ids.tolist()]
    logprobs: list[float] | None = [0.0] * len(whole)
    for turn in run:
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.sampled_ids)
        if logprobs is not None:
            logprobs = None if turn.logprobs is None else [*logprobs[:start], *turn.logprobs.tolist(), *logprobs[end:]]
    return whole, [token for turn in run for token in turn.sampled_ids.tolist()], logprobs


@given(linear_turns())
def test_turns_that_follow_one_another_are_joined_as_by_comparing_each_with_the_one_before(turns: list[Turn]):
    segments = stitch_turns(turns)
    assert [shown(segment) for segment in segments] == joined_in_order(turns)
    assert all(segment.versions is None for segment in segments)


def test_a_history_that_returns_to_an_earlier_turn_is_one_segment_with_it():
    detail: Any = {"prompt_token_ids": [[1], [9], [1, 10, 2]], "completion_token_ids": [[10], [20], [11]]}
    assert [shown(segment)[:2] for segment in segments_of([detail])] == [
        ([9, 20], [20]),
        ([1, 10, 2, 11], [10, 11]),
    ]


def test_of_two_answers_to_the_same_prompt_the_one_that_was_continued_is_kept():
    detail: Any = {"prompt_token_ids": [[1], [1], [1, 10, 2]], "completion_token_ids": [[10], [20], [11]]}
    assert [shown(segment)[:2] for segment in segments_of([detail])] == [([1, 10, 2, 11], [10, 11])]


def test_summaries_are_segments_of_their_own(tmp_path: Path):
    main: Any = {"prompt_token_ids": [[1]], "completion_token_ids": [[10]]}
    summary: Any = {"prompt_token_ids": [[5]], "completion_token_ids": [[20]]}
    write_trial(tmp_path, "a__1", agent="terminus-2", agent_result={"rollout_details": [main, summary]})
    rollout = only(tmp_path)
    assert [shown(segment)[1] for segment in rollout.segments] == [[10], [20]]
    assert (rollout.stats["calls"], rollout.num_sampled) == (2, 2)


@pytest.mark.parametrize(
    ("whole", "steps", "reward"),
    [
        (1.0, [1.0, None], 0.5),  # Harbor's mean leaves out what could not be graded
        (0.5, [1.0, 0.0], 0.5),
        (0.0, [1.0, None, 0.0], 0.0),  # the final step's reward, not a mean
        (None, [None, None], 0.0),
    ],
)
def test_a_step_that_could_not_be_graded_counts_as_zero(
    tmp_path: Path, whole: float | None, steps: list[float | None], reward: float
):
    results = [
        {
            "step_name": str(number),
            "agent_execution": RAN,
            "verifier_result": None if graded is None else {"rewards": {"reward": graded}},
            "exception_info": raised("VerifierTimeoutError") if graded is None else None,
        }
        for number, graded in enumerate(steps)
    ]
    write_trial(tmp_path / "job", "task__a", reward=whole, step_results=results)
    [rollout] = read_job(tmp_path / "job")
    assert rollout.reward == reward
    assert (rollout.failure is not None) == (None in steps)


@pytest.mark.parametrize("verified", [None, {"rewards": None}, {"rewards": {}}, {"rewards": {"reward": float("inf")}}])
def test_what_was_never_graded_has_no_reward_unless_the_policy_can_have_caused_it(tmp_path: Path, verified: Any):
    write_trial(tmp_path, "a__1", verifier_result=verified)
    write_trial(tmp_path, "b__1", verifier_result=verified, exception_info=raised("VerifierTimeoutError"))
    assert [(one.reward, one.failure is None) for one in read_job(tmp_path)] == [(None, True), (0.0, False)]


def test_the_long_name_of_a_task_is_known_from_the_trials_settings_if_its_result_is_not_readable(tmp_path: Path):
    trial = write_trial(tmp_path, "a-long__1")
    (trial / "config.json").write_text('{"task": {"name": "org/a-long-name"}}')
    (trial / "result.json").write_text("{")
    assert only(tmp_path).task == "org/a-long-name"
