"""`dockyard export`: what a trained policy says after it is merged, and everything that must not happen on the way."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from npm_tokenizers import tokenizer_dir
from peft import PeftModel
from safetensors.torch import load_file
from tiny_policy import tiny_model_dir
from transformers import AutoModelForCausalLM, AutoTokenizer

from dockyard.cli import main
from dockyard.config import EngineConfig, GRPOConfig, ModelConfig, RunConfig, TasksConfig, TrainerConfig
from dockyard.engine.embedded.engine import TransformersEngine
from dockyard.engine.protocol import GenerateRequest, Generation
from dockyard.engine.weights import load_model
from dockyard.gateway.render.renderer import Renderer
from dockyard.run_dir.run import HeldoutScore, RunDir
from dockyard.trainer.policy import Policy
from dockyard.types import ASSISTANT, Message, Prompt

type Dtype = Literal["auto", "float32", "bfloat16"]

IDS = torch.arange(3, 40)[None]
HISTORY = Prompt(
    (Message("system", "You help."), Message("user", "Hi."), Message(ASSISTANT, "Yes?"), Message("user", "?"))
)


def write_run(
    path: Path, model: Path, steps: tuple[int, ...] = (2, 4), best: int | None = None, computed_in: Dtype = "auto"
) -> Path:
    """A run whose adapters say something, another thing at each step. Its settings do not say what it computed in."""
    settings = ModelConfig(name=str(model))
    on_cpu = ModelConfig(name=str(model), device="cpu", dtype=computed_in)
    with RunDir.create(path, RunConfig(model=settings, tasks=TasksConfig(source="demo"))) as run:
        policy = Policy(load_model(model, on_cpu), TrainerConfig(lora_r=4), GRPOConfig(), temperature=1.0, seed=0)
        for step in steps:
            torch.manual_seed(step)
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    if parameter.requires_grad:
                        parameter.normal_(std=0.2)
            with run.checkpoints.new(step) as folder:
                policy.save(folder)
            if step == best:
                score = HeldoutScore(step=step, reward=0.75)
                run.checkpoints.keep_best(path / f"checkpoints/step-{step:05}", score)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("module") / "run", tiny_model_dir(), best=2)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def with_adapter(adapter: Path, base: Path | None = None) -> Any:
    return PeftModel.from_pretrained(load(base or tiny_model_dir()), str(adapter))


@pytest.mark.parametrize(("words", "step"), [([], 4), (["--step", "2"], 2)])
def test_a_merged_model_has_the_logits_of_base_and_adapter(run: Path, tmp_path: Path, words: list[str], step: int):
    assert main(["export", str(run), "--output", str(tmp_path / "out"), *words]) == 0
    merged = logits(load(tmp_path / "out"))
    expected = logits(with_adapter(run / f"checkpoints/step-{step:05}"))
    assert (merged - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (merged - logits(load(tiny_model_dir()))).abs().max() > 0.1 * expected.abs().max()


async def greedy(model: Any, folder: Path) -> list[int]:
    """What an agent would be served."""
    renderer = Renderer.load(folder)
    engine = TransformersEngine(model, EngineConfig())
    request = GenerateRequest(
        prompt_ids=renderer.prompt(HISTORY), max_new_tokens=20, temperature=0, stop_ids=renderer.stop_ids, seed=0
    )
    generation = await engine.generate(request)
    await engine.close()
    assert isinstance(generation, Generation)
    return generation.token_ids.tolist()


async def test_an_exported_model_is_prompted_and_answers_as_the_policy(run: Path, tmp_path: Path):
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    policy = await greedy(with_adapter(run / "checkpoints/step-00004"), tiny_model_dir())
    assert await greedy(load(tmp_path / "out"), tmp_path / "out") == policy
    assert len(policy) > 1


def test_an_export_is_a_whole_model_folder_that_names_no_place_of_this_machine(run: Path, tmp_path: Path):
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    for file in tiny_model_dir().iterdir():
        assert (tmp_path / "out" / file.name).exists(), file.name
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny_model_dir() / name).read_bytes()
    for file in (tmp_path / "out").iterdir():
        content = file.read_bytes()
        assert str(run).encode() not in content, file.name
        assert str(tiny_model_dir()).encode() not in content, file.name
    about = json.loads((tmp_path / "out" / "dockyard.json").read_text())
    assert (about["step"], about["thinking_retention"], about["temperature"]) == (4, "all", 1.0)


def stored_in(dtype: torch.dtype, base: Path) -> Path:
    shutil.copytree(tiny_model_dir(), base)
    load(base).to(dtype).save_pretrained(base)
    return base


@pytest.mark.parametrize(
    ("base", "run", "expected"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("float16", "bfloat16", "float16"),
    ],
)
@pytest.mark.parametrize("which", [[], ["--best"]])
def test_a_merged_model_has_the_wider_number_format_of_its_base_and_of_its_run(
    tmp_path: Path, base: str, run: Dtype, expected: str, which: list[str]
):
    folder = stored_in(getattr(torch, base), tmp_path / "base")
    write_run(tmp_path / "run", folder, best=2, computed_in=run)
    if which:  # as it is kept in a real run: without the optimiser's state
        (tmp_path / "run/checkpoints/best/optimizer.pt").unlink()
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out"), *which]) == 0
    kinds = {tensor.dtype for tensor in load_file(tmp_path / "out/model.safetensors").values()}
    assert kinds == {getattr(torch, expected)}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == expected


def test_an_adapter_of_a_float32_run_is_not_rounded_into_a_bfloat16_base(tmp_path: Path):
    base = stored_in(torch.bfloat16, tmp_path / "base")
    run = write_run(tmp_path / "run", base)
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    wide = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = logits(PeftModel.from_pretrained(wide, str(run / "checkpoints/step-00004")))
    assert (logits(load(tmp_path / "out")) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_the_room_that_an_export_needs_is_counted_in_the_format_it_is_written_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    base = stored_in(torch.bfloat16, tmp_path / "base")
    stored = (base / "model.safetensors").stat().st_size
    run = write_run(tmp_path / "run", base)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=int(1.5 * stored)))
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 1
    assert "the whole model needs" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=2 * stored))
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0


def test_a_broken_base_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = shutil.copytree(tiny_model_dir(), tmp_path / "base")
    run = write_run(tmp_path / "run", base)
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 1
    assert f"the model in `{base}` cannot be loaded" in capsys.readouterr().err


def test_an_adapter_alone_is_what_peft_loads_and_nothing_to_resume_from(run: Path, tmp_path: Path):
    assert main(["export", str(run), "--adapter-only", "--output", str(tmp_path / "out")]) == 0
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "dockyard.json", "README.md"}
    assert torch.equal(logits(with_adapter(tmp_path / "out")), logits(with_adapter(run / "checkpoints/step-00004")))


def test_the_best_is_exported_with_its_score(run: Path, tmp_path: Path):
    assert main(["export", str(run), "--best", "--adapter-only", "--output", str(tmp_path / "out")]) == 0
    best = run / "checkpoints/step-00002/adapter_model.safetensors"
    assert (tmp_path / "out/adapter_model.safetensors").read_bytes() == best.read_bytes()
    assert json.loads((tmp_path / "out/dockyard.json").read_text())["heldout_reward"] == 0.75
    assert "0.750 on held-out tasks" in (tmp_path / "out/README.md").read_text()


def test_a_thinking_models_export_keeps_thoughts_in_its_template(tmp_path: Path):
    base = tmp_path / "base"
    shutil.copytree(tiny_model_dir(), base)
    for file in tokenizer_dir("qwen3").glob("*.json"):
        shutil.copy(file, base)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    run = write_run(tmp_path / "run", base, steps=(1,))
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    history = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
        {"role": "user", "content": "3 + 3?"},
    ]
    texts = {
        folder: AutoTokenizer.from_pretrained(folder).apply_chat_template(
            history, tokenize=False, add_generation_prompt=True
        )
        for folder in (base, tmp_path / "out")
    }
    assert "two and two" not in texts[base]
    assert texts[tmp_path / "out"] == texts[base].replace(
        "<|im_start|>assistant\n4", "<|im_start|>assistant\n<think>\ntwo and two\n</think>\n\n4"
    )
    theirs, ours = Renderer.load(base), Renderer.load(tmp_path / "out")
    assert np.array_equal(theirs.prompt(HISTORY), ours.prompt(HISTORY))
    assert ours.rendering == theirs.rendering


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nowhere"], 2, "`nowhere` holds no run"),
        (["run", "--step", "3"], 2, "no checkpoint of step 3"),
        (["run", "--best"], 2, "has kept no best checkpoint"),
        (["run", "--step", "2", "--best"], 2, "`--step` cannot be combined with `--best`"),
        (["run", "--base", "./gone"], 1, "`gone` is not a model folder"),
        (["empty"], 1, "`empty` has no checkpoint yet"),
        (["run", "--output", "file"], 2, "is a file"),
        (["run", "--output", "file/below/it"], 2, "`file/below/it` cannot be made in"),
        (["run", "--output", "mine", "--overwrite"], 2, "holds something else"),
    ],
)
def test_what_cannot_be_exported_is_said_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
):
    monkeypatch.chdir(tmp_path)
    config = RunConfig(model=ModelConfig(name=str(tiny_model_dir())), tasks=TasksConfig(source="demo"))
    RunDir.create(tmp_path / "empty", config).close()
    with RunDir.create(tmp_path / "run", config) as run, run.checkpoints.new(2) as folder:
        (folder / "adapter_config.json").touch()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", *(words if "--output" in words else [*words, "--output", "out"])]) == code
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_an_export_is_replaced_only_when_asked_to_and_only_by_a_whole_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = shutil.copytree(run, tmp_path / "run")
    command = ["export", str(run), "--output", str(tmp_path / "out")]
    assert main([*command, "--step", "2"]) == 0
    assert main(command) == 2
    assert "`--overwrite` replaces it" in capsys.readouterr().err
    weights = run / "checkpoints/step-00004/adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    assert main([*command, "--overwrite"]) == 1
    assert "do not go into" in capsys.readouterr().err
    assert json.loads((tmp_path / "out/dockyard.json").read_text())["step"] == 2
    weights.write_bytes(whole)
    assert main([*command, "--overwrite"]) == 0
    assert json.loads((tmp_path / "out/dockyard.json").read_text())["step"] == 4
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
