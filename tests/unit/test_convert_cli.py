"""`dockyard convert`: what it writes, what it reports, what it refuses, when it exits with 1."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from converting import agent, trajectory, user
from finished_jobs import write_trial
from gateway_fakes import tiny_model, tiny_renderer

from dockyard.cli import main
from dockyard.convert.sample_files import read_samples

DETAILS: Any = {"prompt_token_ids": [[1, 5]], "completion_token_ids": [[6, 7]], "logprobs": [[-1.0, -2.0]]}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def tell(trial: Path) -> None:
    (trial / "agent").mkdir()
    text = json.dumps(trajectory(user("list the files"), agent("ls"), user("a b"), agent("two")))
    (trial / "agent" / "trajectory.json").write_text(text)


@pytest.fixture
def job() -> Path:
    """Two attempts as text, one with ids, one lost, one that is still running."""
    job = Path("job")
    tell(write_trial(job, "a__1", reward=1.0))
    tell(write_trial(job, "a__2", reward=0.0))
    write_trial(job, "b__1", reward=0.5, agent="terminus-2", agent_result={"rollout_details": [DETAILS]})
    (write_trial(job, "b__2") / "result.json").write_text("{")
    (write_trial(job, "b__3") / "result.json").unlink()
    return job


def convert(*words: str | Path) -> int:
    return main(["convert", *map(str, words)])


@pytest.mark.parametrize("name", ["samples.json", "samples.jsonl", "samples.parquet"])
def test_samples_are_written_and_the_report_accounts_for_every_trial(
    job: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    assert convert(job, "--tokenizer", tiny_model(), "--output", name, "--json") == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    named = report.pop("skipped_trials")
    assert [(trial["where"], trial["reason"]) for trial in named] == [
        ("job/b__2", "unreadable"),
        ("job/b__3", "running"),
    ]
    assert all(trial["where"] in trial["detail"] for trial in named)
    samples = list(read_samples(Path(name)))
    tokens = sum(len(sample.tokens) for sample in samples if not sample.remove_sample)
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert report == {
        "trials": 5,
        "converted": 3,
        "exact": 1,
        "text": 2,
        "skipped": {"running": 1, "unreadable": 1},
        "notes": {},
        "samples": 4,
        "worded": 2,
        "segments": 3,
        "tokens": tokens,
        "trained_tokens": trained,
        "masked_share": pytest.approx(1 - trained / tokens),
        "reward_mean": 0.5,
        "rewarded": 3,
    }
    assert [(sample.label, sample.reward, sample.remove_sample) for sample in samples] == [
        ("a", 1.0, False),
        ("a", 0.0, False),
        ("b", 0.5, False),
        ("b", None, True),
    ]
    assert samples[0].response == "ls<|im_end|>\n<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    for line in (
        "converted      3 (1 from exact ids, 2 from text)",
        "`job/b__2/result.json` cannot be read",
        "job/b__3",
    ):
        assert line in captured.err
    assert f"wrote 4 samples to {name}" in captured.err


def test_without_a_tokenizer_ids_alone_are_converted_and_the_rest_is_told(
    job: Path, capsys: pytest.CaptureFixture[str]
):
    assert convert(job, "--output", "s.jsonl") == 0
    [sample, lost] = read_samples(Path("s.jsonl"))
    assert (sample.tokens.tolist(), sample.response, lost.remove_sample) == ([1, 5, 6, 7], "", True)
    err = capsys.readouterr().err
    assert "no_tokenizer 2" in err
    assert "are empty; `tokens` is complete" in err


def test_text_is_tokenised_even_where_ids_are_known(job: Path, capsys: pytest.CaptureFixture[str]):
    assert convert(job, "--tokenizer", tiny_model(), "--text", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["exact"], report["text"], report["skipped"]["no_trajectory"]) == (0, 2, 1)


def test_traces_are_written_in_harbors_columns_without_a_tokenizer_and_read_again(
    job: Path, capsys: pytest.CaptureFixture[str]
):
    assert convert(job, "--traces", "traces.parquet") == 0
    assert "wrote the traces of 2 trials to traces.parquet" in capsys.readouterr().err
    columns = set(parquet.read_schema("traces.parquet").names)
    assert {"conversations", "agent", "model", "task", "episode", "trial_name", "result"} <= columns
    assert convert("traces.parquet", "--tokenizer", tiny_model(), "--output", "again.jsonl") == 0
    assert convert(job, "--tokenizer", tiny_model(), "--output", "first.jsonl", "--text") == 0
    first = [sample for sample in read_samples(Path("first.jsonl")) if not sample.remove_sample]
    again = list(read_samples(Path("again.jsonl")))
    assert [(s.tokens.tolist(), s.reward) for s in again] == [(s.tokens.tolist(), s.reward) for s in first]


def test_when_nothing_converts_the_exit_code_is_1_and_no_file_is_touched(capsys: pytest.CaptureFixture[str]):
    write_trial(Path("job"), "a__1", agent="oracle")
    Path("s.json").write_text("mine")
    assert convert("job", "--tokenizer", tiny_model(), "--output", "s.json", "--traces", "t.parquet") == 1
    assert (Path("s.json").read_text(), Path("t.parquet").exists()) == ("mine", False)
    assert "no_model_calls 1\n    job/a__1: `oracle` calls no model" in capsys.readouterr().err


def test_without_files_it_says_what_could_be_converted(job: Path, capsys: pytest.CaptureFixture[str]):
    assert convert(job, "--tokenizer", tiny_model()) == 0
    assert "nothing was written: `--output samples.parquet`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--output", "s.csv"], "`--output s.csv` has no known file extension", ".json, .jsonl, .parquet, .pt"),
        (["--traces", "t.json"], "`--traces t.json` must end in `.parquet`", "`--traces t.parquet`"),
        (["--text"], "`--text` needs `--tokenizer`", "--text --tokenizer MODEL"),
        (["--output", "no/s.json"], "`no` is not a folder", "`mkdir -p no` creates it"),
    ],
)
def test_misuse_is_refused_before_anything_is_read(
    words: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
):
    assert convert("nowhere", *words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert hint in err


def test_a_source_is_not_written_over(job: Path, capsys: pytest.CaptureFixture[str]):
    assert convert(job, "--traces", "t.parquet") == 0
    assert convert("t.parquet", "--tokenizer", tiny_model(), "--output", "t.parquet") == 2
    assert "is the source itself and would be overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "message"), [("nowhere", "`nowhere` does not exist"), ("empty", "`empty` contains no trials")]
)
def test_a_source_that_is_none_is_an_error(source: str, message: str, capsys: pytest.CaptureFixture[str]):
    Path("empty").mkdir()
    assert convert(source) == 1
    assert message in capsys.readouterr().err


def test_a_tokenizer_that_is_none_is_an_error(job: Path, capsys: pytest.CaptureFixture[str]):
    Path("model").mkdir()
    assert convert(job, "--tokenizer", "./model") == 1
    assert "`model` has no readable `config.json`" in capsys.readouterr().err


def test_of_many_trials_that_were_skipped_for_one_reason_the_table_has_three_and_the_log_the_others(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    for number in range(9):
        write_trial(Path("job"), f"a__{number}", agent="nop")
    with caplog.at_level("INFO", "dockyard"):
        assert convert("job", "--json") == 1
    out, err = capsys.readouterr()
    table = err[err.index("trials  ") :]
    assert [number for number in range(9) if f"job/a__{number}: `nop` calls no model" in table] == [0, 1, 2]
    assert "and 6 more, listed above" in table
    assert [number for number in range(9) if f"job/a__{number}: `nop`" in caplog.text] == [3, 4, 5, 6, 7, 8]
    assert [trial["where"] for trial in json.loads(out)["skipped_trials"]] == [f"job/a__{n}" for n in range(9)]


@pytest.mark.parametrize(("finished", "says"), [(None, True), ("2026-01-01T00:00:00Z", False)])
def test_a_job_that_is_still_running_is_converted_as_far_as_it_is(
    job: Path, finished: str | None, says: bool, capsys: pytest.CaptureFixture[str]
):
    Path(job, "config.json").write_text("{}")
    Path(job, "result.json").write_text(json.dumps({"n_total_trials": 40, "finished_at": finished}))
    assert convert(job, "--tokenizer", tiny_model()) == 0
    assert ("the job is not finished: it has 40 trials in all" in capsys.readouterr().err) == says


def test_the_converter_is_a_public_name():
    from dockyard import HarborTrajectoryConverter

    tell(write_trial(Path("job"), "a__1", reward=1.0))
    [sample] = HarborTrajectoryConverter(tiny_renderer()).load_job("job")
    assert sample.reward == 1.0


def test_samples_of_ids_without_words_are_kept_when_traces_are_wanted_as_well(capsys: pytest.CaptureFixture[str]):
    write_trial(Path("job"), "a__1", agent="terminus-2", agent_result={"rollout_details": [DETAILS]})
    assert convert("job", "--output", "s.jsonl", "--traces", "t.parquet") == 0
    assert len(list(read_samples(Path("s.jsonl")))) == 1
    assert not Path("t.parquet").exists()
    assert "no traces were written to t.parquet: no trial has its text" in capsys.readouterr().err
    assert convert("job", "--traces", "t.parquet") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["job", "s.jsonl"]


@pytest.mark.parametrize("name", ["s.json", "s.jsonl", "s.parquet"])
def test_samples_are_not_converted_again(job: Path, name: str, capsys: pytest.CaptureFixture[str]):
    assert convert(job, "--output", name) == 0
    assert convert(name) == 2
    err = capsys.readouterr().err
    assert f"`{name}` already holds samples" in err
    assert f"--from-job {name}" in err


def test_a_damaged_parquet_is_not_taken_for_samples(capsys: pytest.CaptureFixture[str]):
    Path("t.parquet").write_text("PAR1")
    assert convert("t.parquet") == 1
    assert "`t.parquet` cannot be read" in capsys.readouterr().err


def test_the_converter_reads_traces_whatever_the_file_is_called(job: Path):
    from dockyard import HarborTrajectoryConverter

    assert convert(job, "--traces", "t.parquet") == 0
    converter = HarborTrajectoryConverter(tiny_renderer())
    expected = [sample.tokens.tolist() for sample in converter.load_traces_parquet("t.parquet")]
    Path("t.parquet").rename("t.pq")
    assert [sample.tokens.tolist() for sample in converter.load_traces_parquet("t.pq")] == expected
    assert len(expected) == 2
