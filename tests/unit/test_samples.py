"""Rollouts as files of samples, and back."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_fakes import tiny_renderer

from dockyard.convert.conversation import Converted
from dockyard.convert.sample_files import open_writer, read_samples
from dockyard.convert.samples import Sample, SampleNumbers, converted_samples, groups_of
from dockyard.errors import DockyardError, UsageError
from dockyard.types import Blame, Failure, Rollout, Segment

FORMATS = ("parquet", "json", "jsonl")
LOST = Failure(cause="environment_died", blame=Blame.INFRASTRUCTURE, message="the sandbox is gone")


def segment(*sampled: int, logprobs: bool = True, first_id: int = 5) -> Segment:
    """`sampled` are 0 and 1. The log-probabilities are no round numbers in float32."""
    mask = np.array(sampled, np.bool_)
    drawn = -np.arange(1, len(mask) + 1, dtype=np.float32) / 7
    return Segment(
        token_ids=np.arange(first_id, first_id + len(mask), dtype=np.int32),
        sampled=mask,
        logprobs=np.where(mask, drawn, np.float32(0)) if logprobs else None,
        versions=np.where(mask, 3, -1).astype(np.int32) if logprobs else None,
    )


def converted(
    *segments: Segment,
    task: str = "fix",
    attempt: int = 0,
    reward: float | None = 1.0,
    failure: Failure | None = None,
    skipped: str | None = None,
) -> Converted:
    return Converted(
        where=f"jobs/one/{task}__{attempt}",
        trial=f"{task}__{attempt}",
        agent="qwen-coder",
        model="policy",
        rollout=Rollout(task=task, kind="bug", attempt=attempt, segments=segments, reward=reward, failure=failure),
        exact=True,
        skipped=skipped,
    )


def samples(*trials: Converted) -> list[Sample]:
    numbers = SampleNumbers()
    return [sample for trial in trials for sample in converted_samples(trial, numbers, tiny_renderer())]


def write(path: Path, made: Iterable[Sample], suffix: str | None = None) -> Path:
    with open_writer(path, suffix) as writer:
        for sample in made:
            writer.write(sample)
    return path


def same(one: Any, other: Any) -> bool:
    """Of arrays that may be missing."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and np.array_equal(one, other)


def assert_same(left: Sample, right: Sample) -> None:
    arrays = ("tokens", "loss_mask", "rollout_log_probs", "versions")
    for name in arrays:
        assert same(getattr(left, name), getattr(right, name)), name
    blank: dict[str, Any] = dict.fromkeys(arrays)
    assert replace(left, **blank) == replace(right, **blank)


JOB = (
    converted(segment(0, 0, 1, 1, 0, 1), segment(0, 1, logprobs=False, first_id=40), task="fix", attempt=0),
    converted(task="fix", attempt=1, reward=None, failure=LOST, skipped="no_reward"),
    converted(segment(0, 1, 1), task="other é", reward=-0.25),
)


def test_a_sample_is_a_segment_after_its_first_prompt_with_the_drawn_tokens_marked():
    [first, second] = samples(JOB[0])
    assert first.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert first.response_length == 4
    assert first.loss_mask.tolist() == [True, True, False, True]
    assert first.rollout_log_probs is not None
    assert first.rollout_log_probs.tolist() == (-np.array([3, 4, 0, 6], np.float32) / 7).tolist()
    renderer = tiny_renderer()
    assert first.prompt == renderer.token_text(5) + renderer.token_text(6)
    assert first.response == "".join(renderer.token_text(token) for token in (7, 8, 9, 10))
    assert (first.reward, first.status, first.remove_sample, first.label) == (1.0, "completed", False, "fix")
    assert first.metadata["trial"] == "fix__0"
    assert (second.rollout_log_probs, second.metadata["segment"]) == (None, 1)


def test_segments_share_their_rollouts_id_and_rollouts_their_tasks_group():
    made = samples(*JOB, converted(segment(0, 1), task="fix", attempt=2))
    assert [sample.index for sample in made] == [0, 1, 2, 3, 4]
    assert [sample.rollout_id for sample in made] == [0, 0, 1, 2, 3]
    assert [sample.group_index for sample in made] == [0, 0, 0, 1, 0]


def test_a_lost_rollout_is_padded_as_slime_does_and_has_no_reward():
    [lost] = samples(JOB[1])
    assert lost.tokens.tolist() == [0, 0]
    assert (lost.response_length, lost.loss_mask.tolist()) == (1, [False])
    assert (lost.reward, lost.remove_sample, lost.status) == (None, True, "aborted")
    assert lost.metadata["failure"]["cause"] == "environment_died"


@pytest.mark.parametrize(
    "trial",
    [
        converted(skipped="no_trajectory"),
        converted(reward=None, skipped="running"),
        converted(segment(0, 1), skipped="other_tokenizer"),
        converted(),
    ],
)
def test_what_was_skipped_with_its_reward_or_is_not_over_gives_no_sample(trial: Converted):
    assert samples(trial) == []


def test_a_trajectory_without_a_reward_keeps_its_tokens_and_is_not_for_training():
    [sample] = samples(converted(segment(0, 1), reward=None))
    assert (sample.reward, sample.remove_sample, sample.tokens.tolist()) == (None, True, [5, 6])


@pytest.mark.parametrize(
    ("cause", "status"), [("agent_timeout", "truncated"), ("context_overflow", "truncated"), ("agent_crash", "failed")]
)
def test_a_failure_of_the_policys_keeps_its_reward_and_names_itself(cause: str, status: str):
    failure = Failure(cause=cause, blame=Blame.POLICY, message="m")
    [sample] = samples(converted(segment(0, 1), reward=0.0, failure=failure))
    assert (sample.status, sample.reward, sample.remove_sample) == (status, 0.0, False)


@pytest.mark.parametrize("suffix", FORMATS)
def test_what_was_written_is_read_back_the_same(tmp_path: Path, suffix: str):
    made = samples(*JOB)
    read = list(read_samples(write(tmp_path / f"samples.{suffix}", made)))
    assert len(read) == len(made)
    for one, other in zip(read, made, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("suffix", FORMATS)
def test_groups_are_the_rollouts_that_were_converted(tmp_path: Path, suffix: str):
    groups = groups_of(read_samples(write(tmp_path / f"samples.{suffix}", samples(*JOB))))
    assert [group.task for group in groups] == ["fix", "other é"]
    first, lost = groups[0].rollouts
    assert (first.reward, first.kind, first.attempt, first.failure) == (1.0, "bug", 0, None)
    for segment, original in zip(first.segments, JOB[0].rollout.segments, strict=True):
        for array in ("token_ids", "sampled", "logprobs", "versions"):
            assert same(getattr(segment, array), getattr(original, array)), array
    assert (lost.reward, lost.segments, lost.failure, lost.attempt) == (None, (), LOST, 1)
    assert groups[1].rollouts[0].reward == -0.25


def test_samples_of_one_rollout_with_two_rewards_are_an_error():
    first, second = samples(JOB[0])
    with pytest.raises(DockyardError, match="rollout 0 of `fix` has the rewards"):
        groups_of([first, replace(second, reward=0.0)])


def test_pandas_and_datasets_read_the_parquet(tmp_path: Path):
    import pandas
    from datasets import Dataset

    path = write(tmp_path / "samples.parquet", samples(*JOB))
    frame: Any = pandas.read_parquet(path)
    assert frame["tokens"][0].tolist() == [5, 6, 7, 8, 9, 10]
    assert frame["loss_mask"][0].tolist() == [1, 1, 0, 1]
    assert frame["reward"].isna().tolist() == [False, False, True, False]
    assert json.loads(frame["metadata"][3])["task"] == "other é"
    rows: Any = Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    assert rows[0]["tokens"] == [5, 6, 7, 8, 9, 10]
    assert rows[2]["reward"] is None


def test_the_parquets_schema_does_not_depend_on_what_is_in_it(tmp_path: Path):
    import pyarrow.parquet as pq

    full = pq.read_schema(write(tmp_path / "full.parquet", samples(*JOB)))
    assert full.equals(pq.read_schema(write(tmp_path / "empty.parquet", [])))
    assert full.equals(pq.read_schema(write(tmp_path / "lost.parquet", samples(JOB[1]))))


def test_json_is_one_list_and_jsonl_one_object_a_line(tmp_path: Path):
    made = samples(*JOB)
    listed = json.loads(write(tmp_path / "samples.json", made).read_text())
    lines = write(tmp_path / "samples.jsonl", made).read_text().splitlines()
    assert [sample["index"] for sample in listed] == [0, 1, 2, 3]
    assert [json.loads(line) for line in lines] == listed
    assert json.loads(write(tmp_path / "none.json", []).read_text()) == []
    assert list(read_samples(write(tmp_path / "none.jsonl", []))) == []


def test_many_samples_are_written_in_several_row_groups(tmp_path: Path):
    import pyarrow.parquet as pq

    long = segment(0, *[1] * 300_000)
    made = samples(*(converted(long, attempt=attempt) for attempt in range(5)))
    path = write(tmp_path / "samples.parquet", made)
    assert pq.ParquetFile(path).num_row_groups == 2
    assert [sample.index for sample in read_samples(path)] == list(range(5))


def test_a_format_may_be_named_instead_of_the_suffix(tmp_path: Path):
    path = write(tmp_path / "samples.txt", samples(JOB[0]), "jsonl")
    assert len(path.read_text().splitlines()) == 2


def test_an_unknown_format_is_refused_before_anything_is_converted(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot be in the format `csv`") as error, open_writer(tmp_path / "a.csv"):
        pass
    assert "`.parquet`, `.json`, `.jsonl`, `.pt`" in error.value.hint


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_conversion_that_breaks_off_leaves_what_was_there(tmp_path: Path, suffix: str):
    path = tmp_path / f"samples.{suffix}"
    path.write_text("before")

    def interrupted() -> Iterator[Sample]:
        yield from samples(JOB[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, interrupted())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "before"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DockyardError, match="cannot write `.*file/samples.jsonl`"):
        write(tmp_path / "file" / "samples.jsonl", [])


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_number_that_is_none_is_refused_with_its_trial(tmp_path: Path, suffix: str):
    [sample] = samples(converted(segment(0, 1), reward=float("nan")))
    with pytest.raises(DockyardError, match="`reward` of trial `fix__0` is not a finite number"):
        write(tmp_path / f"samples.{suffix}", [sample])
    assert list(tmp_path.iterdir()) == []


def test_a_rollout_that_was_cut_is_still_one_after_it_was_read_back(tmp_path: Path):
    whole, cut = converted(segment(0, 1)), converted(segment(0, 1), attempt=1)
    cut = replace(cut, rollout=replace(cut.rollout, stats={"cut_at_end": 1}))
    path = write(tmp_path / "samples.jsonl", samples(whole, cut))
    [group] = groups_of(read_samples(path))
    assert [rollout.cut_short for rollout in group.rollouts] == [False, True]
    assert [sample.status for sample in read_samples(path)] == ["completed", "truncated"]


def broken(**fields: object) -> str:
    [sample] = samples(converted(segment(0, 0, 1)))
    return json.dumps({name: value for name, value in {**sample.row(), **fields}.items() if value != "gone"})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"group_index": 1, "tok', "is not JSON"),
        ("[]", "is not a sample"),
        (broken(tokens="gone"), "`tokens`: Field required"),
        (broken(status="fine"), "`status`: Input should be"),
        (broken(tokens=[2**40, 1, 1]), "`tokens.0`: Input should be less than"),
        (broken(reward={"score": 1}), "`reward`: Input should be a valid number"),
        (broken(group_index=None), "`group_index`: Field required"),
        (broken(loss_mask=[1, 1]), "`loss_mask` has 2 values, `response_length` is 1"),
        (broken(rollout_log_probs=[]), "`rollout_log_probs` has 0 values"),
        (broken(response_length=9), "`response_length` is 9, with 3 `tokens`"),
        (
            broken(response_length=3, loss_mask=[1, 0, 1], rollout_log_probs=None, versions=None),
            "its first token is marked as sampled, but there is no prompt before it",
        ),
    ],
)
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, line: str, problem: str):
    path = write(tmp_path / "samples.jsonl", samples(converted(segment(0, 1))))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DockyardError) as error:
        list(read_samples(path))
    assert "samples.jsonl` line 2 is not" in error.value.message
    assert problem in error.value.message


def test_a_parquet_of_something_else_is_named_with_its_columns(tmp_path: Path):
    import pandas

    path = tmp_path / "other.parquet"
    pandas.DataFrame({"text": ["a"], "index": [1]}).to_parquet(path)
    with pytest.raises(
        DockyardError, match="its columns are `text`, `index`, and `group_index`, `tokens`.* are missing"
    ):
        list(read_samples(path))


def test_a_parquet_that_was_cut_is_named(tmp_path: Path):
    path = write(tmp_path / "samples.parquet", samples(*JOB))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DockyardError, match="samples.parquet` cannot be read"):
        list(read_samples(path))


def test_a_parquet_with_a_damaged_middle_is_named(tmp_path: Path):
    path = write(tmp_path / "samples.parquet", samples(*JOB))
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396
    path.write_bytes(data)
    with pytest.raises(DockyardError, match="samples.parquet` (is damaged|row)"):
        list(read_samples(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match="samples.json` is not a file"):
        read_samples(tmp_path / "samples.json")


def test_a_json_file_that_is_no_list_is_named(tmp_path: Path):
    (tmp_path / "samples.json").write_text('{"a": 1}')
    with pytest.raises(DockyardError, match="is not a list of samples"):
        list(read_samples(tmp_path / "samples.json"))


def test_without_torch_a_pt_file_is_refused_at_once_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DockyardError, match="need torch") as error:
        write(tmp_path / "samples.pt", [])
    assert "pip install 'dockyard[train]'" in error.value.hint
    assert list(tmp_path.iterdir()) == []
