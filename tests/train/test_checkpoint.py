"""What a policy saves: an adapter folder that others load, and what its own resume needs besides."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_policy import CPU, make_group, tiny_model_dir, tiny_policy

from dockyard.config import EvalConfig, GRPOConfig, ModelConfig, RunConfig, TasksConfig, TrainerConfig
from dockyard.engine.weights import load_model
from dockyard.errors import DockyardError, UsageError
from dockyard.run_dir.run import RunDir
from dockyard.settings.load import load_run_config
from dockyard.trainer.policy import Policy

IDS = torch.arange(3, 40)[None]


def save(policy: Policy, folder: Path) -> Path:
    folder.mkdir()
    policy.save(folder)
    return folder


def test_peft_loads_a_checkpoint_as_it_is(tmp_path: Path):
    policy = tiny_policy()
    policy.update([make_group([0.0, 1.0])], 10)
    loaded = PeftModel.from_pretrained(load_model(tiny_model_dir(), CPU), str(save(policy, tmp_path / "c")))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=IDS).logits, policy.model.eval()(input_ids=IDS).logits)


def test_an_adapter_names_its_base_as_the_hub_does_and_no_folder_of_this_machine(tmp_path: Path):
    folder = save(tiny_policy(), tmp_path / "c")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == CPU.name
    for file in folder.iterdir():
        assert str(tiny_model_dir()).encode() not in file.read_bytes(), file.name


def test_an_adapter_of_a_folder_names_that_folder(tmp_path: Path):
    settings = ModelConfig(name=str(tiny_model_dir()), device="cpu")
    base = load_model(tiny_model_dir(), settings)
    policy = Policy(base, TrainerConfig(), GRPOConfig(), temperature=1.0, seed=0)
    folder = save(policy, tmp_path / "c")
    named = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(tiny_model_dir())


def test_random_numbers_go_on_where_they_were(tmp_path: Path):
    folder = save(tiny_policy(), tmp_path / "c")
    expected = torch.rand(4)
    other = tiny_policy()
    torch.rand(7)
    other.restore(folder)
    assert torch.equal(torch.rand(4), expected)


def test_a_checkpoint_that_cannot_be_read_says_so(tmp_path: Path):
    folder = save(tiny_policy(), tmp_path / "c")
    file = folder / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DockyardError, match="cannot be read") as caught:
        tiny_policy().restore(folder)
    assert "the one before" in caught.value.hint


def test_a_kept_best_needs_evaluations_during_training():
    with pytest.raises(UsageError, match="`trainer.keep_best` has no effect when `eval.every` is 0"):
        load_run_config(None, ["--tasks.source=demo", "--trainer.keep_best=true"])
    load_run_config(None, ["--tasks.source=demo", "--trainer.keep_best=true", "--eval.every=5"])


def test_what_is_kept_and_tracked_may_change_in_a_run_that_has_begun(tmp_path: Path):
    config = RunConfig(tasks=TasksConfig(source="demo"), eval=EvalConfig(every=5))
    RunDir.create(tmp_path / "run", config).close()
    changes = ["--trainer.keep_last=2", "--trainer.keep_best=true", "--eval.every=3", "--tracker.tensorboard=true"]
    with RunDir.resume(tmp_path / "run", changes) as run:
        assert (run.config.trainer.keep_last, run.config.eval.every, run.config.tracker.tensorboard) == (2, 3, True)
