"""Prime-RL's settings: from a run file, in the files that ship, and translated from an older form.

Each key must be one that Prime-RL has: by a list of them here, and by its own classes where its repository is:

    sh tools/install-verifiers.sh 0.3.1 .cache/verifiers-0.3.1
    PRIME_RL_REPO=CHECKOUT pytest tests/unit/test_prime_rl_toml.py
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from prime_rl_documents import ROOT, documents, leaves, written

from dockyard.backends.launch import Ignored, Supported
from dockyard.backends.prime_rl.launch import BACKEND
from dockyard.backends.prime_rl.setting_support import setting_of
from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.settings.load import load_run_config
from dockyard.settings.text import settings_by_key, toml_document

KEYS = ROOT / "tests" / "data" / "prime_rl_keys.json"
PYTHON = Path(os.environ.get("PRIME_RL_PYTHON", ROOT / ".cache" / "verifiers-0.3.1" / "bin" / "python"))
REPOSITORY = os.environ.get("PRIME_RL_REPO")


def run_file(*words: str) -> RunConfig:
    return load_run_config(None, ["--tasks.train=tasks", "--model.name=Qwen/Qwen3-8B", *words])


@pytest.mark.parametrize("name", documents())
def test_every_key_is_one_that_prime_rl_has(name: str):
    known = set(json.loads(KEYS.read_text()))
    parents = {key.rpartition(".")[0] for key in known}
    assert [key for key, _ in leaves(documents()[name]) if key not in known | parents] == []


@pytest.mark.skipif(REPOSITORY is None, reason="PRIME_RL_REPO names no checkout of Prime-RL")
def test_prime_rl_itself_takes_every_file_and_means_what_it_says(tmp_path: Path):
    files = {name: tmp_path / f"{name}.toml" for name in documents()}
    for name, file in files.items():
        file.write_text(toml_document(documents()[name]))
    path = Path(REPOSITORY or "", "packages", "prime-rl-configs", "src")
    done = subprocess.run(
        [PYTHON, ROOT / "tests" / "prime_rl_resolve.py", *files.values()],
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    resolved = {Path(file).stem: values for file, values in json.loads(done.stdout).items()}
    for name, values in documents().items():
        theirs = list(leaves(resolved[name]))
        assert [pair for pair in leaves(values) if pair[1] != {} and pair not in theirs] == []
    keys = sorted({key for values in resolved.values() for key, _ in leaves(values)})
    assert keys == json.loads(KEYS.read_text())


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("seq_len", "engine.context_length"),
        ("inference.vllm.seed", "seed"),
        ("orchestrator.train.sampling.max_completion_tokens", "sampling.max_new_tokens"),
        ("orchestrator.eval.sampling.max_completion_tokens", "sampling.max_new_tokens"),
        ("and", None),
        ("tasks", None),
    ],
)
def test_a_key_of_prime_rl_leads_to_the_setting_that_decides_it(key: str, setting: str | None):
    assert setting_of(key) == setting


def test_every_setting_is_supported_or_ignored_for_a_reason():
    for key in settings_by_key(RunConfig):
        if not key.startswith(("prime_rl.", "slime.")):
            assert isinstance(BACKEND.support(key, RunConfig()), Supported | Ignored)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--steps=7", "max_steps", 7),
        ("--seed=3", "inference.vllm.seed", 3),
        ("--model.name=Qwen/Qwen3-4B", "model.name", "Qwen/Qwen3-4B"),
        ("--sampling.temperature=0.7", "orchestrator.train.sampling.temperature", 0.7),
        ("--sampling.eval_temperature=0", "orchestrator.eval.sampling.temperature", 0.0),
        ("--sampling.max_new_tokens=99", "orchestrator.train.sampling.max_completion_tokens", 99),
        ("--sampling.max_new_tokens=99", "orchestrator.eval.sampling.max_completion_tokens", 99),
        ("--engine.context_length=9000", "seq_len", 9000),
        ("--engine.context_length=9000", "inference.vllm.max_model_len", 9000),
        ("--rollout.concurrency=77", "orchestrator.concurrency.max_inflight", 77),
        ("--rollout.retries=5", "orchestrator.train.source.env.agent.retries.max_retries", 5),
        ("--rollout.max_staleness=3", "orchestrator.max_off_policy_steps", 3),
        ("--grpo.group_size=6", "orchestrator.group_size", 6),
        ("--grpo.group_size=6", "orchestrator.batch_size", 48),
        ("--grpo.tasks_per_step=3", "orchestrator.batch_size", 12),
        ("--trainer.lr=2e-5", "trainer.optim.lr", 2e-5),
        ("--trainer.warmup_steps=4", "trainer.scheduler.warmup_steps", 4),
        ("--trainer.schedule=linear", "trainer.scheduler.decay_steps", 50),
        ("--trainer.adam_beta2=0.9", "trainer.optim.betas2", 0.9),
        ("--trainer.weight_decay=0.3", "trainer.optim.weight_decay", 0.3),
        ("--trainer.max_grad_norm=0.5", "trainer.optim.max_norm", 0.5),
        ("--trainer.lora_r=8", "trainer.model.lora.rank", 8),
        ("--trainer.lora_alpha=8", "trainer.model.lora.alpha", 8),
        ("--trainer.save_every=4", "ckpt.interval", 4),
        ("--eval.samples=3", "orchestrator.eval.group_size", 3),
        ("--prime_rl.num_train_gpus=3", "deployment.num_train_gpus", 3),
        ("--prime_rl.tensor_parallel=1", "inference.vllm.tensor_parallel_size", 1),
        ("--prime_rl.num_workers=3", "orchestrator.train.source.serve.pool.num_workers", 3),
        ("--prime_rl.renderer.name=glm-4.5", "orchestrator.renderer.name", "glm-4.5"),
        ("--prime_rl.options.trainer.model.cp=2", "trainer.model.cp", 2),
    ],
)
def test_a_setting_is_carried(words: str, key: str, value: object):
    assert (key, value) in list(leaves(written(run_file("--tasks.heldout=heldout", words))))


def test_the_plug_in_finds_tasks_and_agent_in_the_runs_folder():
    found = written(run_file("--tasks.heldout=heldout"))["orchestrator"]
    for split, source in (("train", found["train"]["source"][0]), ("heldout", found["eval"]["source"][0])):
        assert source["env"]["taskset"] == {"id": "harbor_env", "run_dir": "/runs/mine", "split": split}
        assert source["env"]["agent"]["harness"] == {"id": "harbor_env", "run_dir": "/runs/mine"}
        assert source["env"]["agent"]["runtime"] == {"type": "subprocess"}


def test_all_that_prime_rl_writes_is_in_the_runs_folder():
    found = written(run_file())
    assert (found["output_dir"], found["run"]) == ("/runs/mine/backend", {"name": "mine", "dir": "prime-rl"})


def test_without_held_out_tasks_nothing_is_evaluated():
    assert "eval" not in written(run_file())["orchestrator"]


def test_history_stays_as_it_was_sampled():
    assert written(run_file())["orchestrator"]["renderer"] == {"name": "qwen3", "thinking_retention": "all"}


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--model.name=mine/qwen"], "has no renderer for `model.name` = `mine/qwen`"),
        (["--steps=0"], "`steps` is 0"),
        (["--rollout.concurrency=3"], "`rollout.concurrency` is 3"),
        (["--prime_rl.tensor_parallel=2"], "not a multiple of `prime_rl.tensor_parallel`, 2"),
        (
            ["--prime_rl.options.trainer.optim.lr=1"],
            "`prime_rl.options.trainer.optim.lr` is already set to `1e-06` by another setting",
        ),
        (["--prime_rl.options.orchestrator.train.source=[]"], "`prime_rl.options.orchestrator.train.source` is"),
    ],
)
def test_what_contradicts_itself_is_refused(words: list[str], part: str):
    with pytest.raises(UsageError) as caught:
        written(run_file(*words))
    assert part in caught.value.message


def test_an_option_that_a_setting_decides_is_refused_with_the_setting():
    with pytest.raises(UsageError) as caught:
        written(run_file("--prime_rl.options.orchestrator.batch_size=9"))
    assert caught.value.hint == "set `grpo.tasks_per_step` instead"


@pytest.mark.parametrize(
    ("words", "key", "why"),
    [
        ((), "grpo.clip_low", "by the change of their probability"),
        ((), "grpo.clip_high", "by the change of their probability"),
        ((), "grpo.kl_coef", "it has no reference model"),
        ((), "rollout.max_lost_share", "its own rule"),
        ((), "trainer.micro_batch_tokens", "it packs sequences"),
        ((), "gateway.port", "its own gateway"),
        ((), "engine.max_batch", "it starts vLLM itself"),
        (("--model.dtype=float32",), "model.dtype", "bfloat16"),
        (("--model.device=cpu",), "model.device", "it needs GPUs"),
        (("--prime_rl.num_workers=2",), "rollout.max_building", "to each worker separately"),
    ],
)
def test_a_setting_that_it_would_ignore_is_known_with_the_reason(words: tuple[str, ...], key: str, why: str):
    support = BACKEND.support(key, run_file(*words))
    assert isinstance(support, Ignored)
    assert why in support.why


@pytest.mark.parametrize(
    "key", ["model.dtype", "model.device", "tasks.source", "rollout.max_building", "engine.retry_s"]
)
def test_what_it_does_anyway_is_no_reason_to_refuse(key: str):
    assert isinstance(BACKEND.support(key, run_file()), Supported)


def test_no_penalty_against_the_base_model_is_what_it_has():
    assert isinstance(BACKEND.support("grpo.kl_coef", run_file("--grpo.kl_coef=0")), Supported)


def test_a_run_goes_on_from_its_checkpoint_and_begins_again_without_one(tmp_path: Path):
    theirs = tmp_path / "backend" / "prime-rl"
    fresh = written(run_file(), tmp_path)
    assert "resume" not in fresh
    assert "clean" not in fresh
    (theirs / "logs").mkdir(parents=True)
    assert written(run_file(), tmp_path)["clean"] is True
    (theirs / "checkpoints" / "step_10").mkdir(parents=True)
    again = written(run_file(), tmp_path)
    assert again["resume"] == {}
    assert "clean" not in again


def test_a_step_to_go_on_from_may_be_named(tmp_path: Path):
    (tmp_path / "backend" / "prime-rl" / "checkpoints" / "step_10").mkdir(parents=True)
    assert written(run_file("--prime_rl.options.resume.step=5"), tmp_path)["resume"] == {"step": 5}


def test_prime_rl_must_be_where_the_run_file_says(tmp_path: Path):
    config = run_file(f"--prime_rl.checkout={tmp_path}")
    with pytest.raises(DockyardError, match=f"`{tmp_path}/.venv/bin/rl` does not exist"):
        BACKEND.check(config)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in {"rl": "", "python": "#!/bin/sh\necho 'No module named harbor_env' >&2\nexit 1\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    with pytest.raises(DockyardError, match="cannot import the plug-in `harbor_env`: No module named harbor_env"):
        BACKEND.check(config)
    assert BACKEND.plan(config, Path("/runs/mine")).command[0] == str(programs / "rl")
