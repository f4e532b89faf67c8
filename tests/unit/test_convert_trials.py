"""Jobs, trials, runs and trajectories on disk: what is broken is named, the rest is converted."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from converting import agent, ids, runs, trajectory, user
from finished_jobs import raised, write_trial
from gateway_fakes import tiny, tiny_model, tiny_renderer, write_model

from dockyard.chat_format import parse_exchange
from dockyard.config import RunConfig
from dockyard.convert.conversation import Converted
from dockyard.convert.read import count_trials, read_trials
from dockyard.convert.samples import SampleNumbers, converted_samples, groups_of
from dockyard.convert.traces import write_traces
from dockyard.errors import DockyardError
from dockyard.gateway.render.renderer import Renderer
from dockyard.run_dir.run import EVAL, ROLLOUTS, RunDir
from dockyard.types import Blame, Failure, IntArray, Json, Message, Rollout, Segment

GO = user("please list the files in the folder and count the lines")
STEPS = (GO, agent("ls"), user("a b"), agent("two"))
SPOKEN = ["ls<|im_end|>", "two<|im_end|>"]


def tell(folder: Path, *steps: Any, file: str = "agent/trajectory.json", **more: Any) -> Path:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trajectory(*(steps or STEPS), **more)))
    return folder


def converted(path: Path, **more: Any) -> dict[str, Converted]:
    return {found.trial: found for found in read_trials(path, tiny_renderer(), **more)}


def spoken(found: Converted) -> list[str]:
    return [text for segment in found.rollout.segments for sampled, text in runs(segment, tiny_renderer()) if sampled]


def encode(text: str) -> list[int]:
    return tiny().encode(text, add_special_tokens=False).ids


PROMPT = encode(f"<|im_start|>user\n{GO['message']}<|im_end|>\n<|im_start|>assistant\n")
DRAWN = [*encode("l"), *encode("s"), *encode("<|im_end|>")]
DETAILS: Any = {"prompt_token_ids": [PROMPT], "completion_token_ids": [DRAWN], "logprobs": [[-1.0, -2.0, -3.0]]}


def test_a_trajectory_gives_tokens_and_the_result_the_reward_by_the_same_rules_as_ever(tmp_path: Path):
    info = {"name": "qwen-coder", "version": "1", "model_info": {"name": "m", "provider": "harbor-skip-parsing"}}
    tell(write_trial(tmp_path, "a__1", reward=0.25, agent_info=info))
    tell(write_trial(tmp_path, "a__2", reward=None, exception_info=raised("AgentTimeoutError")))
    found = converted(tmp_path)
    assert [spoken(one) for one in found.values()] == [SPOKEN, SPOKEN]
    assert [(one.rollout.task, one.rollout.attempt, one.rollout.reward) for one in found.values()] == [
        ("a", 0, 0.25),
        ("a", 0, 0.0),  # the first of another agent
    ]
    first = found["a__1"]
    assert (first.agent, first.model, first.exact, first.skipped) == ("qwen-coder", "m", False, None)
    assert found["a__2"].model == "org/model"
    assert first.rollout.stats["trained_tokens"] == first.rollout.num_sampled > 0
    assert count_trials(tmp_path) == 2


def test_a_lost_trial_has_no_tokens_but_its_words(tmp_path: Path):
    tell(write_trial(tmp_path, "a__1", exception_info=raised("CancelledError")))
    found = converted(tmp_path)["a__1"]
    assert (found.skipped, found.detail, found.rollout.reward) == (
        "no_reward",
        "cancelled: CancelledError: it broke",
        None,
    )
    assert (found.rollout.segments, len(found.conversations)) == ((), 1)


def test_ids_that_terminus_2_kept_are_used_as_they_are_and_left_aside_on_request(tmp_path: Path):
    trial = write_trial(tmp_path, "a__1", agent="terminus-2", agent_result={"rollout_details": [DETAILS]})
    tell(trial, GO, agent("Plan: ls"), name="terminus-2")
    found = converted(tmp_path)["a__1"]
    [segment] = found.rollout.segments
    assert (found.exact, found.notes) == (True, ())
    assert segment.token_ids.tolist() == PROMPT + DRAWN
    assert segment.logprobs is not None
    assert segment.logprobs[segment.sampled].tolist() == [-1, -2, -3]
    as_text = converted(tmp_path, exact=False)["a__1"]
    assert (as_text.exact, as_text.notes) == (False, ("rebuilt_replies",))
    assert '"plan": "ls"' in spoken(as_text)[0]
    assert as_text.rollout.segments[0].logprobs is None


def test_ids_of_a_trajectory_are_used_where_the_result_has_none_and_missing_ones_are_noted(tmp_path: Path):
    tell(write_trial(tmp_path, "a__1"), GO, agent("ls", **ids(PROMPT, DRAWN)), user("a b"), agent("two"))
    found = converted(tmp_path)["a__1"]
    assert found.exact
    assert [segment.token_ids.tolist() for segment in found.rollout.segments] == [PROMPT + DRAWN]
    assert found.notes == ("turns_without_ids",)


@pytest.mark.parametrize(
    ("prompt", "sampled", "detail"),
    [
        (PROMPT, [151_645], "id 151645 is not in this tokenizer's vocabulary"),
        (PROMPT, [-7], "id -7 is not in this tokenizer's vocabulary"),
        ([token_id + 40 for token_id in PROMPT], DRAWN, "its decoded ids contain 0% of the words of the conversation"),
    ],
)
def test_ids_of_another_tokenizer_are_not_trained_on(
    tmp_path: Path, prompt: list[int], sampled: list[int], detail: str
):
    tell(write_trial(tmp_path, "a__1"), GO, agent("ls", **ids(prompt, sampled)))
    found = converted(tmp_path)["a__1"]
    assert (found.skipped, found.rollout.segments) == ("other_tokenizer", ())
    assert found.detail == f"{detail}; `--text` renders the text instead"
    assert spoken(converted(tmp_path, exact=False)["a__1"]) == ["ls<|im_end|>"]


def test_a_tokenizer_is_needed_for_text_only(tmp_path: Path):
    tell(write_trial(tmp_path, "a__1"))
    write_trial(tmp_path, "b__1", agent="terminus-2", agent_result={"rollout_details": [DETAILS]})
    text, exact = read_trials(tmp_path, None)
    assert (text.skipped, len(text.conversations)) == ("no_tokenizer", 1)
    assert (exact.skipped, exact.exact, exact.rollout.num_sampled) == (None, True, 3)


def test_what_is_broken_is_named_with_its_file_and_the_rest_is_converted(tmp_path: Path):
    tell(write_trial(tmp_path, "good__1"))
    (write_trial(tmp_path, "running__1") / "result.json").unlink()
    half = write_trial(tmp_path, "half__1") / "result.json"
    half.write_text(half.read_text()[:100])
    (tell(write_trial(tmp_path, "torn__1")) / "agent" / "trajectory.json").write_text('{"schema_ver')
    write_trial(tmp_path, "silent__1", agent="codex")
    write_trial(tmp_path, "oracle__1", agent="oracle")
    tell(write_trial(tmp_path, "wild__1"), GO, agent("ls", **ids([2**40], [1])))
    huge: Any = {"prompt_token_ids": [[1]], "completion_token_ids": [[2**40]]}
    write_trial(tmp_path, "huge__1", agent_result={"rollout_details": [huge]})
    tell(write_trial(tmp_path, "backwards__1"), agent("ls"))
    found = converted(tmp_path)
    assert {name: one.skipped for name, one in found.items()} == {
        "good__1": None,
        "running__1": "running",
        "half__1": "unreadable",
        "torn__1": "unreadable",
        "silent__1": "no_trajectory",
        "oracle__1": "no_model_calls",
        "wild__1": "unreadable",
        "huge__1": "unreadable",
        "backwards__1": "not_renderable",
    }
    for name, file in (
        ("running__1", "running__1"),
        ("half__1", "half__1/result.json"),
        ("torn__1", "trajectory.json"),
    ):
        assert file in found[name].detail


def test_a_torn_trajectory_does_not_matter_where_the_result_has_the_ids(tmp_path: Path):
    trial = write_trial(tmp_path, "a__1", agent="terminus-2", agent_result={"rollout_details": [DETAILS]})
    (tell(trial) / "agent" / "trajectory.json").write_text("{")
    found = converted(tmp_path)["a__1"]
    assert (found.exact, found.notes) == (True, ("trajectory_unreadable",))
    assert converted(tmp_path, exact=False)["a__1"].skipped == "unreadable"


def test_steps_of_a_task_are_read_in_the_order_they_were_taken(tmp_path: Path):
    steps = [{"step_name": name, "agent_execution": None} for name in ("second", "first")]
    trial = write_trial(tmp_path, "a__1", step_results=steps)
    tell(trial, user("go"), agent("one"), file="steps/second/agent/trajectory.json")
    tell(trial, user("on"), agent("two"), file="steps/first/agent/trajectory.json")
    assert spoken(converted(tmp_path)["a__1"]) == ["one<|im_end|>", "two<|im_end|>"]


def test_logged_model_calls_are_believed_more_than_a_trajectory(tmp_path: Path):
    trial = tell(write_trial(tmp_path, "a__1", agent="openhands"), user("go"), agent("Running command: ls"))
    reply = {"choices": [{"message": {"role": "assistant", "content": "I look."}}]}
    call = {"messages": [{"role": "user", "content": "go"}], "response": reply}
    (trial / "agent" / "completions").mkdir()
    (trial / "agent" / "completions" / "m-1.5.json").write_text(json.dumps(call))
    assert spoken(converted(tmp_path)["a__1"]) == ["I look.<|im_end|>"]


def test_thoughts_that_the_template_cannot_show_are_noted(tmp_path: Path):
    tell(write_trial(tmp_path, "a__1"), user("go"), agent("ls", reasoning_content="Hm."))
    assert converted(tmp_path)["a__1"].notes == ("thoughts_left_out",)


def test_a_single_trial_and_a_folder_of_jobs_can_be_named(tmp_path: Path):
    trial = tell(write_trial(tmp_path / "jobs" / "one", "a__1"))
    tell(write_trial(tmp_path / "jobs" / "two", "b__1"))
    for job in ("one", "two"):
        (tmp_path / "jobs" / job / "config.json").write_text("{}")
        (tmp_path / "jobs" / job / "result.json").write_text("{}")
    assert set(converted(trial)) == {"a__1"}
    assert set(converted(tmp_path / "jobs")) == {"a__1", "b__1"}
    tell(write_trial(tmp_path / "trials" / "rollouts-000-00" / "job-x", "c__1"))  # as `--harbor-cli` leaves them
    assert set(converted(tmp_path / "trials")) == {"c__1"}


def test_a_trajectory_alone_has_no_reward_unless_it_lies_in_its_trial(tmp_path: Path):
    trial = tell(write_trial(tmp_path, "a__1", reward=0.5))
    [inside] = read_trials(trial / "agent" / "trajectory.json", tiny_renderer())
    assert (inside.rollout.reward, inside.rollout.task, spoken(inside)) == (0.5, "a", SPOKEN)
    (alone := tmp_path / "mine.json").write_text(json.dumps(trajectory(*STEPS)))
    [found] = read_trials(alone, tiny_renderer())
    assert (found.rollout.reward, found.notes, spoken(found)) == (None, ("no_reward",), SPOKEN)
    alone.write_text("[1]")
    [broken] = read_trials(alone, tiny_renderer())
    assert broken.skipped == "unreadable"
    assert str(alone) in broken.detail


def test_a_source_that_is_not_there_or_holds_nothing_is_an_error(tmp_path: Path):
    with pytest.raises(DockyardError, match="does not exist"):
        list(read_trials(tmp_path / "none", None))
    with pytest.raises(DockyardError, match="contains no trials"):
        list(read_trials(tmp_path, None))


def segment(prompt: list[int], sampled: list[int]) -> Segment:
    size = len(prompt) + len(sampled)
    marks = np.arange(size) >= len(prompt)
    return Segment(
        token_ids=np.array([*prompt, *sampled], np.int32),
        sampled=marks,
        logprobs=-marks.astype(np.float32),
        versions=np.where(marks, 3, -1).astype(np.int32),
    )


def rollout(attempt: int, *segments: Segment, reward: float | None = 1.0, **more: Any) -> Rollout:
    return Rollout(task="t", kind="k", attempt=attempt, segments=segments, reward=reward, failure=None, **more)


EXCHANGE = {
    "messages": [{"role": "user", "content": "go"}],
    "tools": [],
    "reply": {"role": "assistant", "content": "ls"},
    "finish": "stop",
    "delivered": True,
}
LOST = Failure(cause="engine_down", blame=Blame.INFRASTRUCTURE, message="gone")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    config = RunConfig.model_validate({"tasks": {"source": "demo"}, "agent": {"name": "aider"}})
    with RunDir.create(tmp_path / "run", config) as run:
        yield run


def test_the_rollouts_of_a_run_stay_as_they_were_recorded(run: RunDir):
    recorded = [rollout(0, segment(PROMPT, DRAWN)), rollout(1, segment(PROMPT, DRAWN[::-1]), segment([5], [6, 7]))]
    for one in recorded:
        run.write_rollout(ROLLOUTS, one)
    found = list(read_trials(run.path, tiny_renderer()))
    assert [one.exact for one in found] == [True, True]
    assert [one.trial for one in found] == ["rollouts-000-00", "rollouts-000-01"]
    assert found[0].agent == "aider"
    numbers = SampleNumbers()
    [group] = groups_of([sample for one in found for sample in converted_samples(one, numbers, None)])
    for back, one in zip(group.rollouts, recorded, strict=True):
        for left, right in zip(back.segments, one.segments, strict=True):
            for name in ("token_ids", "sampled", "logprobs", "versions"):
                assert np.array_equal(getattr(left, name), getattr(right, name))


def test_a_run_in_text_mode_is_tokenised(run: RunDir):
    run.write_rollout(ROLLOUTS, rollout(0, exchanges=(parse_exchange(EXCHANGE),)))
    [found] = read_trials(run.path, tiny_renderer())
    assert (found.exact, spoken(found)) == (False, ["ls<|im_end|>"])


def test_of_a_run_what_is_lost_torn_or_for_evaluation_is_skipped_by_name(run: RunDir):
    run.write_rollout(ROLLOUTS, rollout(0, segment([1], [2])))
    run.write_rollout(ROLLOUTS, rollout(0, segment([1], [2, 3])))
    with run.paths.rollouts_of(ROLLOUTS).open("ab") as file:
        file.write(b'{"phase": "rollouts"}\n')
    run.write_rollout(ROLLOUTS, Rollout(task="t", kind="", attempt=1, segments=(), reward=None, failure=LOST))
    run.write_rollout(ROLLOUTS, rollout(2))
    run.write_rollout(EVAL, rollout(0, segment([1], [2])))
    with run.paths.rollouts_of(ROLLOUTS).open("ab") as file:
        file.write(b'{"phase": "rol')
    found = list(read_trials(run.path, tiny_renderer()))
    assert [(one.skipped, one.rollout.num_sampled) for one in found] == [
        ("evaluation", 0),
        (None, 2),
        ("unreadable", 0),
        ("no_reward", 0),
        ("no_model_calls", 0),
    ]
    assert "rollouts.jsonl line 3" in found[2].detail
    [evaluated] = read_trials(run.paths.rollouts_of(EVAL), tiny_renderer())
    assert evaluated.skipped is None


def test_groups_of_different_steps_are_not_mixed(run: RunDir):
    for step in ("step-00000", "step-00001"):
        run.write_rollout(step, rollout(0, segment([1], [2])))
    numbers = SampleNumbers()
    samples = [sample for one in read_trials(run.path, None) for sample in converted_samples(one, numbers, None)]
    assert [sample.group_index for sample in samples] == [0, 1]


def test_ids_of_a_run_with_another_tokenizer_are_noticed_by_its_transcript(run: RunDir):
    transcript = "please list the files in the folder and count the lines of each"
    run.write_rollout(ROLLOUTS, rollout(0, segment([40] * 50, [41])), transcript=transcript)
    [found] = read_trials(run.path, tiny_renderer())
    assert found.skipped == "other_tokenizer"


def test_a_run_without_rollouts_says_where_its_trials_are(run: RunDir):
    with pytest.raises(DockyardError) as caught:
        list(read_trials(run.path, None))
    assert caught.value.hint == f"`dockyard convert {run.path / 'trials'}` reads its trials"


def test_a_run_that_has_ids_only_cannot_be_converted_as_text(run: RunDir):
    run.write_rollout(ROLLOUTS, rollout(0, segment(PROMPT, DRAWN)))
    [found] = read_trials(run.path, tiny_renderer(), exact=False)
    assert (found.skipped, "`trials` folder" in found.detail) == ("no_trajectory", True)


def test_any_folder_with_a_tokenizer_will_do(tmp_path: Path):
    from dockyard.convert import HarborTrajectoryConverter

    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model")
    tell(write_trial(tmp_path / "job", "a__1", reward=0.5))
    write_trial(tmp_path / "job", "b__1")
    for tokenizer in (tmp_path / "model", str(tmp_path / "model"), Renderer.load(tmp_path / "model")):
        converter = HarborTrajectoryConverter(tokenizer)
        [sample] = converter.load_job(tmp_path / "job")
        assert (sample.reward, sample.response.startswith("ls<|im_end|>")) == (0.5, True)
        assert dict(converter.report.skipped) == {"no_trajectory": 1}


@pytest.mark.parametrize("verified", [None, {"rewards": None}, {"rewards": {}}, {"rewards": {"reward": float("nan")}}])
def test_a_trial_that_was_never_graded_has_no_reward_and_keeps_its_words(tmp_path: Path, verified: Any):
    tell(write_trial(tmp_path, "a__1", verifier_result=verified))
    details = {"rollout_details": [DETAILS]}
    write_trial(tmp_path, "b__1", agent="terminus-2", agent_result=details, verifier_result=verified)
    for found in read_trials(tmp_path, tiny_renderer()):
        assert (found.skipped, found.detail) == ("no_reward", "the trial was not graded")
        assert (found.rollout.reward, found.rollout.segments) == (None, ())
    assert len(converted(tmp_path)["a__1"].conversations) == 1


@pytest.mark.parametrize("reference", ["x" * 5000, "a\0b", "trajectory.json/x"])
def test_a_reference_that_is_no_name_of_a_file_is_a_file_that_is_missing(tmp_path: Path, reference: str):
    tell(write_trial(tmp_path, "a__1"), *STEPS, continued_trajectory_ref=reference)
    found = converted(tmp_path)["a__1"]
    assert (spoken(found), found.notes) == (SPOKEN, ("file_missing",))


class Picky(Renderer):
    """Raises an unexpected error at a given word."""

    def reply(self, message: Message, tools: Sequence[Json] = ()) -> IntArray:
        if message.text == "boom":
            raise ZeroDivisionError("over\nthe moon")
        return super().reply(message, tools)


def test_what_nobody_thought_of_costs_one_trial(tmp_path: Path, run: RunDir):
    tell(write_trial(tmp_path / "job", "a__1"), user("go"), agent("boom"))
    tell(write_trial(tmp_path / "job", "b__1"))
    for number, word in enumerate(("boom", "ls")):
        exchange = parse_exchange(EXCHANGE | {"reply": {"role": "assistant", "content": word}})
        run.write_rollout(ROLLOUTS, rollout(number, exchanges=(exchange,)))
    write_traces(tmp_path / "t.parquet", read_trials(tmp_path / "job", None))
    renderer = Picky.load(tiny_model())
    for path in (tmp_path / "job", tmp_path / "t.parquet", run.path):
        bad, good = read_trials(path, renderer)
        assert (bad.skipped, bad.detail) == ("unreadable", f"{bad.where}: ZeroDivisionError: over")
        assert good.skipped is None


def test_settings_of_a_run_that_cannot_be_read_do_not_hinder(run: RunDir):
    run.write_rollout(ROLLOUTS, rollout(0, segment(PROMPT, DRAWN)))
    for text in ("[agent", 'agent = "x"\nmodel = 7\n'):
        (run.path / "config.toml").write_text(text)
        [found] = read_trials(run.path, tiny_renderer())
        assert (found.exact, found.agent, found.model) == (True, "", "")


def test_a_call_whose_arguments_are_no_json_is_context(tmp_path: Path):
    odd = {"tool_call_id": "c1", "function_name": "bash", "arguments": '{"command": "ls'}
    results = [{"source_call_id": "c1", "content": "bad JSON"}]
    tell(write_trial(tmp_path, "a__1"), GO, agent("I look.", odd, results=results), agent("two"))
    tell(write_trial(tmp_path, "b__1"), GO, agent("I look.", odd, results=results))
    found = converted(tmp_path)
    assert spoken(found["a__1"]) == ["two<|im_end|>"]
    assert found["a__1"].notes == ("no_tool_definitions", "malformed_calls")
    assert found["b__1"].skipped == "not_renderable"
    write_traces(tmp_path / "t.parquet", found.values())
    assert spoken(converted(tmp_path / "t.parquet")["a__1"]) == ["two<|im_end|>"]


def group_sizes(path: Path) -> list[list[str]]:
    """The trials of each group."""
    groups: dict[str, list[str]] = {}
    for found in read_trials(path, tiny_renderer()):
        groups.setdefault(found.group, []).append(found.trial)
    return sorted(groups.values())


def test_tasks_of_one_name_in_two_folders_are_two_groups(tmp_path: Path):
    for number, place in enumerate(("setA", "setB", "setA")):
        task = {"path": f"/{place}/fix"}
        tell(write_trial(tmp_path, f"fix__{number}", task_id=task, config={"task": task}))
    assert group_sizes(tmp_path) == [["fix__0", "fix__2"], ["fix__1"]]
    assert [(one.rollout.task, one.rollout.attempt) for one in converted(tmp_path).values()] == [
        ("fix", 0),
        ("fix", 0),
        ("fix", 1),
    ]


def test_a_corrupt_result_stays_in_the_group_of_its_task_by_what_the_trial_was_started_with(tmp_path: Path):
    name = "a-task-with-a-name-of-more-than-32-letters"
    model = {"name": "m", "provider": "org"}
    config = {"task": {"path": f"/tasks/{name}"}, "agent": {"name": "aider", "model_name": "org/m"}}
    for number in range(2):
        info = {"name": "aider", "version": "1", "model_info": model}
        trial = write_trial(tmp_path, f"{name[:32]}__{number}", task_id=config["task"], config=config, agent_info=info)
        (tell(trial) / "config.json").write_text(json.dumps(config))
    (tmp_path / f"{name[:32]}__1" / "result.json").write_text("{")
    assert group_sizes(tmp_path) == [[f"{name[:32]}__0", f"{name[:32]}__1"]]
    assert [(one.rollout.task, one.skipped) for one in converted(tmp_path).values()] == [
        (name, None),
        (name, "unreadable"),
    ]


def test_other_agents_and_other_models_are_other_groups(tmp_path: Path):
    for number, (name, model) in enumerate([("x", "m"), ("x", "n"), ("y", "m"), ("x", "m")]):
        info = {"name": name, "version": "1", "model_info": {"name": model, "provider": "p"}}
        tell(write_trial(tmp_path, f"a__{number}", agent_info=info))
    expected = [["a__0", "a__3"], ["a__1"], ["a__2"]]
    assert group_sizes(tmp_path) == expected
    write_traces(tmp_path / "t.parquet", read_trials(tmp_path, None))
    assert group_sizes(tmp_path / "t.parquet") == expected
