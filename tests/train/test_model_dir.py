import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from gateway_fakes import write_model
from tiny_policy import CPU, tiny_model_dir

from dockyard.config import EngineConfig, ModelConfig
from dockyard.engine.embedded.engine import TransformersEngine
from dockyard.engine.model_dir import DEMO_MODEL, _installers, find_model
from dockyard.engine.weights import load_model, share_weights
from dockyard.errors import DockyardError, EngineError
from dockyard.gateway.render.renderer import Renderer
from dockyard.types import Message, Prompt

Usage = namedtuple("Usage", "total used free")


def test_a_model_folder_is_taken_as_it_is():
    assert find_model(str(tiny_model_dir())) == tiny_model_dir()


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "nowhere", "a/b/c"])
def test_a_folder_that_is_not_there_is_named_with_what_would_do(name: str):
    with pytest.raises(DockyardError, match=re.escape(name.removeprefix("./"))) as caught:
        find_model(name)
    assert DEMO_MODEL in caught.value.hint


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_refused(tmp_path: Path, missing: str):
    shutil.copytree(tiny_model_dir(), tmp_path / "m")
    (tmp_path / "m" / missing).unlink()
    with pytest.raises(DockyardError, match=f"no readable `{missing}`"):
        find_model(str(tmp_path / "m"))


def test_weights_that_cannot_be_read_are_an_error_with_the_folder_in_it(tmp_path: Path):
    shutil.copytree(tiny_model_dir(), tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(DockyardError, match=re.escape(str(tmp_path / "m"))):
        load_model(tmp_path / "m", CPU)


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path):
    with pytest.raises(DockyardError, match="chat template"):
        Renderer.load(write_model(tmp_path, template=None))


def test_a_hub_model_out_of_reach_says_what_else_would_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DockyardError, match="`no-one/no-model` is not a folder here") as caught:
        find_model("no-one/no-model")
    assert DEMO_MODEL in caught.value.hint


def test_a_full_disk_is_found_before_the_demo_model_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOCKYARD_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10**9, 10**9 - 2**20, 2**20))
    with pytest.raises(DockyardError, match="has 1 MB free; the demo's model needs 600 MB") as caught:
        find_model(DEMO_MODEL)
    assert "DOCKYARD_CACHE" in caught.value.hint


def test_a_gpu_that_is_not_there_is_refused():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(DockyardError, match="torch sees no GPU"):
        load_model(tiny_model_dir(), ModelConfig(device="cuda"))


def test_a_model_with_sliding_attention_is_refused():
    model = load_model(tiny_model_dir(), CPU)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(EngineError, match="sliding_attention"):
        TransformersEngine(model, EngineConfig())


def test_a_shared_model_holds_frozen_weights_once():
    model = load_model(tiny_model_dir(), CPU).requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    twin = share_weights(model)
    assert twin.model.layers[0].mlp.up_proj.weight is model.model.layers[0].mlp.up_proj.weight
    assert twin.lm_head.weight is not model.lm_head.weight
    assert not any(parameter.requires_grad for parameter in twin.parameters())


def test_the_demo_model_speaks_its_template():
    folder = find_model(DEMO_MODEL)
    assert find_model(DEMO_MODEL) == folder
    renderer = Renderer.load(folder)
    ids = renderer.prompt(Prompt((Message("system", "Be brief."), Message("user", "Say <|im_end|>."))))
    assert renderer.token_text(int(ids[0])) == "<|im_start|>"
    assert ids.tolist().count(2) == 2  # two turns end, and the one in the text does not


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_tokenizer_that_cannot_be_read_is_an_error_with_the_folder_in_it(tmp_path: Path, broken: str):
    write_model(tmp_path)
    (tmp_path / broken).write_text("{not json")
    with pytest.raises(DockyardError, match=re.escape(str(tmp_path))):
        Renderer.load(tmp_path)


def test_the_installer_of_this_environment_is_tried_first():
    import subprocess

    first, *_ = _installers()
    assert subprocess.run([*first, "--version"], capture_output=True, check=False).returncode == 0
