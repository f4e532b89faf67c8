"""SLiME's debug files, written and read. What its `Sample.from_dict` asks for is stated here: it is not on PyPI."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gateway_fakes import tiny_renderer
from slime_stand_in import Sample as SlimeSample

from dockyard.convert.conversation import Converted
from dockyard.convert.sample_files import open_writer, read_samples
from dockyard.convert.samples import Sample, SampleNumbers, converted_samples, groups_of
from dockyard.convert.slime_pt import slime_rows
from dockyard.errors import DockyardError
from dockyard.types import Blame, Failure, Rollout, Segment

pytestmark = pytest.mark.train

COMMON = {
    "group_index": int,
    "index": int,
    "rollout_id": int,
    "prompt": str,
    "tokens": list,
    "response": str,
    "response_length": int,
    "label": str,
    "reward": float,
    "loss_mask": list,
    "status": str,
    "remove_sample": bool,
    "metadata": dict,
    "weight_versions": list,
}
"""Fields that SLiME's and Miles' samples both have."""
STATUS = ("pending", "completed", "truncated", "aborted", "failed")


def segment(*sampled: int, logprobs: bool = True) -> Segment:
    mask = np.array(sampled, np.bool_)
    return Segment(
        token_ids=np.arange(5, 5 + len(mask), dtype=np.int32),
        sampled=mask,
        logprobs=np.where(mask, np.float32(-1 / 3), np.float32(0)) if logprobs else None,
        versions=np.where(mask, np.arange(len(mask)) // 3, -1).astype(np.int32) if logprobs else None,
    )


def samples(*trials: tuple[Segment, ...]) -> list[Sample]:
    """One rollout each, of one task; one without segments is lost."""
    numbers = SampleNumbers()
    return [sample for attempt, segments in enumerate(trials) for sample in _samples(attempt, segments, numbers)]


def _samples(attempt: int, segments: tuple[Segment, ...], numbers: SampleNumbers) -> list[Sample]:
    failure = None if segments else Failure(cause="host_error", blame=Blame.INFRASTRUCTURE, message="m")
    rollout = Rollout(
        task="fix",
        kind="",
        attempt=attempt,
        segments=segments,
        reward=0.5 if segments else None,
        failure=failure,
    )
    skipped = None if segments else "no_reward"
    trial = Converted(where="w", trial=f"fix__{attempt}", agent="a", model="m", rollout=rollout, skipped=skipped)
    return converted_samples(trial, numbers, tiny_renderer())


def write(path: Path, made: list[Sample]) -> Path:
    with open_writer(path) as writer:
        for sample in made:
            writer.write(sample)
    return path


def load(path: Path) -> list[dict[str, Any]]:
    content = torch.load(path, weights_only=True)
    assert set(content) == {"rollout_id", "samples"}
    assert type(content["rollout_id"]) is int
    return content["samples"]


THREE = ((segment(0, 0, 1, 1, 0, 1), segment(0, 1, 1)), (), (segment(0, 1),))


def test_a_file_loads_as_plain_data_with_the_fields_that_slime_reads(tmp_path: Path):
    rows = load(write(tmp_path / "rollout_0.pt", samples(*THREE)))
    for row in rows:
        assert {name: type(row[name]) for name in COMMON} == COMMON
        assert set(row) == {*COMMON, "rollout_log_probs"}
        assert row["status"] in STATUS
        assert len(row["loss_mask"]) == len(row["rollout_log_probs"]) == row["response_length"] <= len(row["tokens"])
        assert all(type(token) is int for token in row["tokens"] + row["loss_mask"])
        assert all(type(logprob) is float for logprob in row["rollout_log_probs"])
        pairs = zip(row["loss_mask"], row["rollout_log_probs"], strict=True)
        assert all(logprob == 0.0 for drawn, logprob in pairs if not drawn)


def test_segments_of_a_rollout_share_its_id_and_carry_its_whole_reward(tmp_path: Path):
    rows = load(write(tmp_path / "rollout_0.pt", samples(*THREE)))
    assert [row["rollout_id"] for row in rows] == [0, 0, 1, 2]
    assert [row["reward"] for row in rows] == [0.5, 0.5, 0.0, 0.5]
    assert {row["group_index"] for row in rows} == {0}
    assert rows[0]["weight_versions"] == ["0", "1", "1"]


def test_a_lost_rollout_is_padded(tmp_path: Path):
    row = load(write(tmp_path / "rollout_0.pt", samples(*THREE)))[2]
    padding = {"tokens": [0, 0], "response_length": 1, "loss_mask": [0], "rollout_log_probs": [0.0], "reward": 0.0}
    assert {name: row[name] for name in padding} == padding
    assert (row["remove_sample"], row["status"]) == (True, "aborted")


def test_what_was_written_is_read_back(tmp_path: Path):
    made = samples(*THREE)
    read = list(read_samples(write(tmp_path / "rollout_0.pt", made)))
    for one, other in zip(read, made, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.loss_mask, other.loss_mask)
        if other.rollout_log_probs is not None:
            assert one.rollout_log_probs is not None
            assert np.array_equal(one.rollout_log_probs, other.rollout_log_probs)
        blank: dict[str, Any] = {"tokens": None, "loss_mask": None, "rollout_log_probs": None, "versions": None}
        assert replace(one, **blank) == replace(other, **blank)
    [group] = groups_of(read)
    assert [rollout.reward for rollout in group.rollouts] == [0.5, None, 0.5]


def test_logprobs_of_a_part_of_the_samples_are_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    made = samples((segment(0, 1),), (segment(0, 1, logprobs=False),))
    with caplog.at_level(logging.WARNING):
        rows = load(write(tmp_path / "rollout_0.pt", made))
    assert [row["rollout_log_probs"] for row in rows] == [None, None]
    assert "1 of 2 samples have no log-probabilities" in caplog.text


def test_a_file_of_lost_rollouts_alone_lacks_nothing(tmp_path: Path):
    [row] = load(write(tmp_path / "rollout_0.pt", samples(())))
    assert row["rollout_log_probs"] == [0.0]


def test_a_file_of_slimes_own_is_read(tmp_path: Path):
    row = {
        "group_index": 3,
        "index": 7,
        "rollout_id": None,
        "prompt": [{"role": "user", "content": "hi"}],
        "tokens": [1, 2, 3],
        "multimodal_inputs": None,
        "response": "x",
        "response_length": 2,
        "label": None,
        "reward": 1.0,
        "loss_mask": None,
        "rollout_log_probs": None,
        "remove_sample": False,
        "status": "completed",
        "metadata": {},
        "spec_info": {"spec_accept_token_num": 0},
    }
    torch.save({"rollout_id": 4, "samples": [row]}, tmp_path / "4.pt")
    [sample] = read_samples(tmp_path / "4.pt")
    assert (sample.rollout_id, sample.loss_mask.tolist(), sample.label) == (7, [True, True], "")
    [group] = groups_of([sample])
    assert group.rollouts[0].segments[0].sampled.tolist() == [False, True, True]


@pytest.mark.parametrize("content", [[1, 2], {"samples": 3}, {"weights": torch.zeros(2)}])
def test_a_file_of_something_else_is_named(tmp_path: Path, content: object):
    torch.save(content, tmp_path / "0.pt")
    with pytest.raises(DockyardError, match="0.pt` is not a SLiME file with samples"):
        list(read_samples(tmp_path / "0.pt"))


def test_a_file_that_was_cut_is_named(tmp_path: Path):
    path = write(tmp_path / "0.pt", samples(*THREE))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DockyardError, match="0.pt` is not a SLiME file with samples"):
        list(read_samples(path))


def test_a_conversion_that_breaks_off_leaves_no_file(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), open_writer(tmp_path / "0.pt"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_slime_makes_its_own_samples_of_what_we_write(tmp_path: Path):
    rows = load(write(tmp_path / "rollout_0.pt", samples((segment(0, 1, 1), segment(0, 0, 1)), ())))
    made = [SlimeSample.from_dict(row) for row in rows]
    assert [one.rollout_id for one in made] == [0, 0, 1]
    assert [one.status for one in made] == [SlimeSample.Status(row["status"]) for row in rows]
    for one, row in zip(made, rows, strict=True):
        again = one.to_dict()
        assert {key: again[key] for key in row} == row


def test_what_slime_saves_of_our_samples_is_read_back_as_the_same_groups(tmp_path: Path):
    made = samples((segment(0, 1, 1), segment(0, 0, 1)), (segment(0, 1),), ())
    live = [SlimeSample.from_dict(row) for row in slime_rows(made)]
    torch.save({"rollout_id": 3, "samples": [one.to_dict() for one in live]}, tmp_path / "rollout_3.pt")
    [group] = groups_of(read_samples(tmp_path / "rollout_3.pt"))
    assert [(rollout.attempt, rollout.reward, len(rollout.segments)) for rollout in group.rollouts] == [
        *((0, 0.5, 2), (1, 0.5, 1), (2, None, 0))
    ]
    found = group.rollouts[0].segments[0]
    assert found.token_ids.tolist() == [5, 6, 7]
    assert found.logprobs is not None
    assert found.logprobs.tolist() == pytest.approx([0, -1 / 3, -1 / 3])
