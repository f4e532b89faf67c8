"""The cost of each `trainer.method`: memory at rest and in an update, seconds per update, seconds to publish weights.

    python bench/methods.py --size 1.5b             # a GPU; random weights of Qwen2.5-1.5B's shape
    python bench/methods.py --size 7b --methods lora qlora
    python bench/methods.py --size tiny             # a test of this script on a CPU

`qlora` needs bitsandbytes; `--methods lora full` leaves it out.
"""

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from dockyard.config import EngineConfig, GRPOConfig, ModelConfig, TrainerConfig
from dockyard.engine.embedded.engine import TransformersEngine
from dockyard.engine.protocol import GenerateRequest, Generation
from dockyard.engine.weights import load_model
from dockyard.rl.pack import Example
from dockyard.rl.trees import plant
from dockyard.trainer.policy import Policy

VOCAB = 151_936
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "tie_word_embeddings": False},
}  # fmt: skip
SMALL = {"num_key_value_heads": 2, "tie_word_embeddings": True}
"""What Qwen2.5's smaller sizes have in common."""
UPDATES = 3


def write_model(size: str, device: str, folder: Path) -> float:
    """Write a model with random weights and return its size in billions."""
    config = Qwen2Config(vocab_size=VOCAB, max_position_embeddings=32_768, **(SMALL | SIZES[size]))
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters()) / 1e9


def examples(num: int, length: int) -> list[Example]:
    rng = np.random.default_rng(0)
    return [
        Example(
            token_ids=rng.integers(0, 150_000, length).astype(np.int32),
            targets=np.arange(length // 4, length, dtype=np.int32),
            old_logprobs=None,
            advantage=1.0 if index % 2 else -1.0,
            weight=1 / length,
        )
        for index in range(num)
    ]


def gib(device: str, *, peak: bool = False) -> float:
    if device != "cuda":
        return 0.0
    return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 2**30


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


async def serve(policy: Policy, folder: Path) -> tuple[float, float]:
    """Return the seconds to publish, and the distance of the engine's logprobs from the trainer's after that."""
    engine = TransformersEngine(policy.serving_model(), EngineConfig(prefix_cache_mb=64, context_length=1024))
    start = time.perf_counter()
    policy.save_weights(folder)
    await engine.publish(folder, 1)
    seconds = time.perf_counter() - start
    prompt = np.arange(100, 164, dtype=np.int32)
    request = GenerateRequest(prompt_ids=prompt, max_new_tokens=32, temperature=1.0, stop_ids=frozenset(), seed=0)
    drawn = await engine.generate(request)
    await engine.close()
    assert isinstance(drawn, Generation)
    ids = np.concatenate([prompt, drawn.token_ids]).astype(np.int32)
    targets = np.arange(len(prompt), len(ids), dtype=np.int32)
    whole = Example(token_ids=ids, targets=targets, old_logprobs=drawn.logprobs, advantage=1.0, weight=1.0)
    [tree] = plant([whole], 4096)
    with torch.no_grad():
        own = policy.logprobs(tree.rows[0]).float().cpu().numpy()
    return seconds, float(np.abs(own - drawn.logprobs).mean())


def measure(method: Any, folder: Path, billions: float, arguments: argparse.Namespace, device: str) -> str:
    model = ModelConfig(name=str(folder), device="cuda" if device == "cuda" else "cpu")
    base = load_model(folder, model, four_bit=method == "qlora")
    trainer = TrainerConfig(method=method, lr=1e-6 if method == "full" else 1e-5, compile=not arguments.eager)
    policy = Policy(base, trainer, GRPOConfig(kl_coef=0.0), temperature=1.0, seed=0)
    trees = plant(examples(arguments.num, arguments.length), trainer.micro_batch_tokens)
    metrics = policy.train_on(trees, trainer.lr)  # compiles, and makes the optimiser's memory
    free(device)
    rest = gib(device)
    start = time.perf_counter()
    for _ in range(UPDATES):
        metrics = policy.train_on(trees, trainer.lr)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / UPDATES
    peak = gib(device, peak=True)
    assert metrics["train/grad_norm"] > 0, metrics
    assert not metrics["train/skipped"], metrics
    publish_s, mismatch = asyncio.run(serve(policy, folder.with_name(f"published-{method}")))
    cells = (
        f"{arguments.num * arguments.length / seconds:,.0f}",
        f"{seconds:.2f}",
        f"{rest:.1f}",
        f"{rest * 2**30 / 1e9 / billions:.1f}",
        f"{peak:.1f}",
        f"{publish_s:.2f}",
        f"{mismatch:.4f}",
    )
    return f"| {method} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--methods", nargs="+", choices=("lora", "qlora", "full"), default=["lora", "qlora", "full"])
    parser.add_argument("--num", type=int, default=8, help="sequences in an update")
    parser.add_argument("--length", type=int, default=4096, help="tokens of each")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        billions = write_model(arguments.size, device, folder)
        free(device)
        print(f"{billions:.2f} billion weights, {arguments.num} sequences of {arguments.length} tokens, {device}\n")
        print("| method | tok/s | s an update | GiB at rest | bytes a weight | GiB peak | s to publish | logprob gap |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for method in arguments.methods:
            print(measure(method, folder, billions, arguments, device), flush=True)
            free(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
