"""The embedded engine on one GPU against `model.generate`; see `bench/engine.py`, which runs it.

All requests arrive at once. `generate` runs every row as long as the longest; only requested tokens count.
It has no adapter; the engine has a LoRA of rank 16 on all linear layers, as in a training run.
"""

import asyncio
import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from update import policy_model

from dockyard.config import EngineConfig, TrainerConfig
from dockyard.engine.embedded.engine import TransformersEngine
from dockyard.engine.embedded.scheduler import Counts
from dockyard.engine.protocol import GenerateRequest, Generation
from dockyard.trainer.network import with_adapters
from dockyard.types import IntArray

VOCABULARY = 150_000


@dataclass(frozen=True, slots=True)
class Load:
    """The requests."""

    prompts: list[IntArray]
    new_tokens: list[int]

    @classmethod
    def of(cls, seed: int, *, num: int, prompt: int, least: int, most: int) -> "Load":
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(0, VOCABULARY, prompt).astype(np.int32) for _ in range(num)]
        return cls(prompts, np.random.default_rng(0).integers(least, most + 1, num).tolist())


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    system: str
    tokens: int
    seconds: float
    warm_up_s: float
    """Compiling and recording included; not part of `seconds`."""
    peak_gib: float
    details: dict[str, float] = field(default_factory=dict[str, float])

    def line(self) -> str:
        rate = f"{self.tokens / self.seconds:,.0f}"
        return f"| {self.system} | {rate} | {self.seconds:.2f} | {self.peak_gib:.1f} | {self.warm_up_s:.0f} |"


def measured(system: str, load: Load, warm_up: Callable[[], Any], work: Callable[[], Any]) -> Figure:
    start = time.perf_counter()
    warm_up()
    _synchronize()
    warm_up_s = time.perf_counter() - start
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    work()
    _synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return Figure(system, sum(load.new_tokens), seconds, warm_up_s, peak)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def generate(model: Any, load: Load, warm: Load, cache: str | None) -> Figure:
    """Run one call with all prompts as a batch; each row gets as many new tokens as the longest request."""
    most = max(load.new_tokens)

    def run(asked: Load, new_tokens: int) -> None:
        ids = torch.from_numpy(np.stack(asked.prompts)).long().to(model.device)
        enough = ids.shape[1] + new_tokens

        def stop(ids_BT: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return torch.full((len(ids_BT),), ids_BT.shape[1] >= enough, device=ids_BT.device)

        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=most,
            max_new_tokens=most,
            do_sample=True,
            top_k=0,
            stopping_criteria=[stop],
            cache_implementation=cache,
        )

    name = "`generate`, static cache" if cache else "`generate`, dynamic cache"
    return measured(name, load, lambda: run(warm, 8), lambda: run(load, most))


def engine(model: Any, load: Load, warm: Load) -> Figure:
    """Run the embedded engine, and measure what its thread spent its time on."""
    ours = TransformersEngine(model, EngineConfig(max_batch=len(load.prompts)))
    before: list[Counts] = []

    def run(asked: Load) -> None:
        before.append(Counts(**asdict(ours.counts)))
        asyncio.run(ask_all(ours, asked))

    figure = measured("dockyard, adapter on", load, lambda: run(warm), lambda: run(load))
    spent = {f.name: getattr(ours.counts, f.name) - getattr(before[-1], f.name) for f in fields(Counts)}
    asyncio.run(ours.close())
    return Figure(figure.system, figure.tokens, figure.seconds, figure.warm_up_s, figure.peak_gib, spent)


async def ask_all(ours: TransformersEngine, load: Load) -> list[Generation]:
    requests = [
        GenerateRequest(prompt_ids=prompt, max_new_tokens=new, temperature=1.0, stop_ids=frozenset(), seed=index)
        for index, (prompt, new) in enumerate(zip(load.prompts, load.new_tokens, strict=True))
    ]
    answers = await asyncio.gather(*(ours.generate(request) for request in requests))
    return [answer for answer in answers if isinstance(answer, Generation)]


def breakdown(figure: Figure) -> str:
    spent = figure.details
    rest = figure.seconds - spent["pass_s"] - spent["step_s"]
    return (
        f"prompts: {spent['pass_tokens']:,.0f} tokens in {spent['passes']:.0f} passes, {spent['pass_s']:.2f} s; "
        f"decoding: {spent['step_tokens']:,.0f} tokens in {spent['steps']:.0f} steps, {spent['step_s']:.2f} s, "
        f"{1000 * spent['step_s'] / max(1, spent['steps']):.2f} ms a step; the rest {rest:.2f} s"
    )


def compare(size: str, systems: list[str], out: Path | None) -> None:
    """Print the table of a model of this size (`7b`, or `tiny` to test this script)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {"num": 128, "prompt": 512, "least": 64, "most": 256}
    if size == "tiny":
        shape = {"num": 6, "prompt": 16, "least": 4, "most": 12}
    load, warm = Load.of(1, **shape), Load.of(2, **shape)
    model = policy_model(size, device).eval()
    print("| system | tok/s | seconds | peak GiB | warm-up s |\n|---|---|---|---|---|", flush=True)
    figures: list[Figure] = []
    for system in sorted(systems, key=lambda system: system == "ours"):  # last: it takes the model over
        if system == "ours":
            adapted = with_random_adapters(model)
            figures.append(engine(adapted, load, warm))
        else:
            figures.append(generate(model, load, warm, "static" if system == "static" else None))
        print(figures[-1].line(), flush=True)
    for figure in figures:
        if figure.details:
            print(breakdown(figure))
    if out:
        out.write_text(json.dumps([asdict(figure) for figure in figures], indent=2))


def with_random_adapters(base: Any) -> Any:
    """Fill the adapters with random values; a new adapter is all zeros."""
    model = with_adapters(base, TrainerConfig(lora_r=16, lora_alpha=32)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.01)
    return model


def check() -> None:
    """Print the distance of the engine's logprobs from those of one plain float32 forward pass over the same tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.06,  # large enough that wrong attention shows
    )
    torch.manual_seed(0)
    plain: Any = LlamaForCausalLM(config).eval().requires_grad_(False)
    plain = plain.to(device)
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        served: Any = LlamaForCausalLM(copy.deepcopy(config)).eval().requires_grad_(False)
        served = served.to(device)
        served.load_state_dict(plain.state_dict())
        ours = TransformersEngine(served.to(dtype), EngineConfig(max_batch=16))
        head = np.random.default_rng(5).integers(0, VOCABULARY, 700).astype(np.int32)
        load = Load.of(3, num=40, prompt=90, least=3, most=200)
        load = Load(
            [*load.prompts[:20], *(np.concatenate([head, prompt]) for prompt in load.prompts[20:])], load.new_tokens
        )
        for turn in range(2):  # the second time beginnings are known
            answers = asyncio.run(ask_all(ours, load))
            gaps = np.concatenate([_gaps(plain, *pair) for pair in zip(load.prompts, answers, strict=True)])
            far = f"mean gap {gaps.mean():.2g}, most {gaps.max():.2g}"
            print(f"{dtype} on {device}, turn {turn}: {len(gaps)} tokens, {far}", flush=True)
        asyncio.run(ours.close())


def _gaps(plain: Any, prompt: IntArray, answer: Generation) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt, answer.token_ids])).long().to(plain.device)
    logprobs = plain(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return np.abs(logprobs.gather(1, ids[len(prompt) :, None])[:, 0].cpu().numpy() - answer.logprobs)
