"""The embedded engine against one plain `model.generate` call on the same prompts as a batch.

32 requests arrive at random over the first second, 100-token prompts, 32 new tokens each. One table:

    python bench/engine.py [--model smollm2-135m] [--repeats 3]
"""

import argparse
import asyncio
import random
import time
from statistics import median
from typing import Any

import numpy as np
import torch

from dockyard.config import EngineConfig, ModelConfig
from dockyard.engine import GenerateRequest
from dockyard.engine.model_dir import find_model
from dockyard.engine.transformers import TransformersEngine
from dockyard.engine.weights import load_model, share_weights
from dockyard.types import IntArray

NUM_REQUESTS, PROMPT_TOKENS, NEW_TOKENS, ARRIVAL_S = 32, 100, 32, 1.0


def plain(model: Any, prompts: list[IntArray]) -> float:
    """Seconds of one `generate` call."""
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
    """Seconds from the first arrival to the last answer."""

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


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    model = load_model(find_model(arguments.model), ModelConfig(name=arguments.model, dtype="float32")).eval()
    model.requires_grad_(False)
    engine = TransformersEngine(share_weights(model), EngineConfig())
    rng = random.Random(0)
    tokens = NUM_REQUESTS * NEW_TOKENS
    print(f"{'run':>4} {'generate tok/s':>15} {'engine tok/s':>13} {'ratio':>6}")
    ratios: list[float] = []
    for repeat in range(arguments.repeats + 1):
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
    asyncio.run(main())
