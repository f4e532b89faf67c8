"""The embedded engine against one plain `model.generate` call on the same prompts as a batch.

32 requests arrive at random over the first second, 100-token prompts, 32 new tokens each. Prints one table:

    python bench/engine.py [--model smollm2-135m] [--repeats 3]

On one GPU, a 7B policy (Qwen2.5-7B's shape, random weights, bf16), 128 concurrent requests, 512 tokens in, 64-256 out;
and the distance of the engine's logprobs from those of a plain forward pass:

    python bench/engine.py --gpu7b [--systems generate,static,ours] [--out figures.json]
    python bench/engine.py --check
"""

import argparse
import asyncio
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import engine_gpu
import numpy as np
import torch

from dockyard.config import EngineConfig, ModelConfig
from dockyard.engine.embedded.engine import TransformersEngine
from dockyard.engine.model_dir import find_model
from dockyard.engine.protocol import GenerateRequest
from dockyard.engine.weights import load_model, share_weights
from dockyard.types import IntArray

NUM_REQUESTS, PROMPT_TOKENS, NEW_TOKENS, ARRIVAL_S = 32, 100, 32, 1.0


def plain(model: Any, prompts: list[IntArray]) -> float:
    """Return the seconds of one `generate` call."""
    ids = torch.from_numpy(np.stack(prompts)).long().to(model.device)
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        top_k=0,
    )
    return time.perf_counter() - start


async def ours(engine: TransformersEngine, prompts: list[IntArray], rng: random.Random) -> float:
    """Return the seconds from the first request to the last answer."""

    async def ask(prompt: IntArray, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        request = GenerateRequest(
            prompt_ids=prompt,
            max_new_tokens=NEW_TOKENS,
            temperature=1.0,
            stop_ids=frozenset(),
            seed=rng.randrange(2**31),
        )
        await engine.generate(request)

    start = time.perf_counter()
    await asyncio.gather(*(ask(prompt, rng.uniform(0, ARRIVAL_S)) for prompt in prompts))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gpu7b", action="store_true")
    parser.add_argument("--size", choices=["7b", "tiny"], default="7b", help="`tiny` tries --gpu7b anywhere")
    parser.add_argument("--systems", default="generate,static,ours")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        engine_gpu.check()
    elif arguments.gpu7b:
        engine_gpu.compare(arguments.size, arguments.systems.split(","), arguments.out)
    else:
        asyncio.run(against_generate(arguments.model, arguments.repeats))


async def against_generate(name: str, repeats: int) -> None:
    """Print the table of requests that arrive one after the other."""
    model = load_model(find_model(name), ModelConfig(name=name, dtype="float32")).eval()
    model.requires_grad_(False)
    engine = TransformersEngine(share_weights(model), EngineConfig())
    rng = random.Random(0)
    tokens = NUM_REQUESTS * NEW_TOKENS
    print(f"{'run':>4} {'generate tok/s':>15} {'engine tok/s':>13} {'ratio':>6}")
    ratios: list[float] = []
    for repeat in range(repeats + 1):
        # New prompts each time, so that the engine's prefix cache never helps.
        prompts = [np.array(rng.choices(range(1000, 40000), k=PROMPT_TOKENS), np.int32) for _ in range(NUM_REQUESTS)]
        plain_s, ours_s = plain(model, prompts), await ours(engine, prompts, rng)
        if repeat == 0:
            continue  # warm-up of both
        ratios.append(plain_s / ours_s)
        print(f"{repeat:>4} {tokens / plain_s:>15.1f} {tokens / ours_s:>13.1f} {ratios[-1]:>6.2f}")
    print(f"median ratio {median(ratios):.2f} on {model.device}, {torch.get_num_threads()} threads")
    await engine.close()


if __name__ == "__main__":
    main()
