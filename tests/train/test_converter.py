"""The converter takes what programs have: a tokenizer of `transformers`."""

import json
from pathlib import Path

import pytest
from converting import agent, trajectory, user
from finished_jobs import write_trial
from gateway_fakes import CHATML, tiny_model, tiny_renderer
from transformers import PreTrainedTokenizerFast

from dockyard import HarborTrajectoryConverter

pytestmark = pytest.mark.train


def test_a_tokenizer_of_transformers_gives_the_samples_of_its_folder(tmp_path: Path):
    trial = write_trial(tmp_path / "job", "a__1", reward=0.5)
    (trial / "agent").mkdir()
    text = json.dumps(trajectory(user("list the files"), agent("ls"), user("a b"), agent("two")))
    (trial / "agent" / "trajectory.json").write_text(text)
    file = str(tiny_model() / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|im_end|>", chat_template=CHATML)
    [sample] = HarborTrajectoryConverter(tokenizer).load_job(tmp_path / "job")
    [expected] = HarborTrajectoryConverter(tiny_renderer()).load_job(tmp_path / "job")
    assert sample.tokens.tolist() == expected.tokens.tolist()
    assert (sample.response, sample.reward) == (expected.response, 0.5)
