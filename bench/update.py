"""One GRPO update on one GPU: Dockyard against TRL and against plain transformers + PEFT, on the same tokens.

A 7B policy (Qwen2.5-7B's shape, random weights), LoRA r=16, bf16. Old logprobs are given in all systems; the pass for
reference logprobs has its own column. MFU counts 4 N T for the weights (N without the input embeddings) and 7 T^2 d L
for causal attention, without recomputation, relative to 790 TFLOP/s, which an H200 reaches in matrix products.

    python bench/update.py [--lengths 4096,16384] [--systems ours,trl,plain] [--parts lengths,shared,head,gradients,moe]
    python bench/update.py --parts lengths --systems ours --card-gib 24 --offload    with the memory of a smaller GPU
"""

import argparse
import copy
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from dockyard.config import GRPOConfig, TrainerConfig
from dockyard.engine.torch_internals import replace_call
from dockyard.errors import DockyardError
from dockyard.rl.pack import Example, PackedRow, pack
from dockyard.rl.trees import Tree, plant
from dockyard.trainer.network import _Head
from dockyard.trainer.policy import Policy

PEAK_FLOPS = 790e12
SIZES: dict[str, dict[str, Any]] = {
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    "tiny": {"hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 28},
}
PREFIX, OWN, GROUP = 17_408, 6_144, 8
OUR_WAYS: dict[str, dict[str, Any]] = {
    ", shared": {},
    ", not shared, a row each": {"shared": False},
    ", not shared, rows of 65,536": {"shared": False, "row_tokens": 65_536},
}
"""In which a group is trained."""
TAKEN: list[torch.Tensor] = []
"""Memory of the GPU that nobody else can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table."""

    system: str
    what: str
    tokens: int
    """As agents saw them: a prefix that is shared counts for everybody who has it."""
    seconds: float | None
    """None: it did not fit."""
    mfu: float | None = None
    peak_gib: float | None = None
    reference_s: float | None = None

    def line(self) -> str:
        if self.seconds is None:
            return f"| {self.what} | {self.system} | does not fit | | | | |"
        cells = (
            f"{self.seconds:.2f}",
            f"{self.tokens / self.seconds:,.0f}",
            f"{self.mfu:.1%}" if self.mfu is not None else "",
            f"{self.peak_gib:.0f}" if self.peak_gib is not None else "",
            f"{self.reference_s:.2f}" if self.reference_s is not None else "",
        )
        return f"| {self.what} | {self.system} | {' | '.join(cells)} |"


def random_model(config: Any, kind: Any, device: str) -> Any:
    """Create a model with random weights on its device. The values do not matter, but are not degenerate."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model = kind._from_config(config)
    finally:
        torch.set_default_dtype(before)
    return model.requires_grad_(False)


def policy_model(size: str, device: str) -> Any:
    config = Qwen2Config(vocab_size=152_064, num_key_value_heads=4, max_position_embeddings=131_072, **SIZES[size])
    return random_model(config, Qwen2ForCausalLM, device)


def flops(model: Any, lengths: list[int]) -> float:
    config = model.config
    embedded = model.get_input_embeddings().weight.numel()
    weights = sum(p.numel() for name, p in model.named_parameters() if "lora" not in name) - embedded
    attention = 7 * config.hidden_size * config.num_hidden_layers
    return float(sum(4 * weights * length + attention * length**2 for length in lengths))


def example(rng: np.random.Generator, prompt: np.ndarray, num_own: int) -> Example:
    ids = np.concatenate([prompt, rng.integers(0, 150_000, num_own)]).astype(np.int32)
    targets = np.arange(len(prompt), len(ids), dtype=np.int32)
    old = rng.normal(-12, 0.1, len(targets)).astype(np.float32)
    return Example(token_ids=ids, targets=targets, old_logprobs=old, advantage=1.0, weight=1 / num_own)


def timed(work: Callable[[], Any], device: str, *, repeats: int = 1, warm: bool = False) -> tuple[float, float] | None:
    """Return seconds and peak memory, after a warm-up call that compiles if needed; None if it does not fit."""
    try:
        if warm:
            work()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / repeats
        taken = sum(memory.nbytes for memory in TAKEN)
        return seconds, (torch.cuda.max_memory_allocated() - taken) / 2**30 if device == "cuda" else 0.0
    except (torch.OutOfMemoryError, DockyardError) as error:
        print(f"does not fit: {error}", file=sys.stderr)
        return None


def unshared(examples: list[Example], row_tokens: int) -> list[Tree]:
    """Pack as many whole sequences into a row as fit, without sharing."""
    rows: list[list[Example]] = []
    for item in examples:
        if not rows or sum(len(other.token_ids) for other in rows[-1]) + len(item.token_ids) > row_tokens:
            rows.append([])
        rows[-1].append(item)
    return [Tree(prefix=np.zeros(0, dtype=np.int32), rows=(side_by_side(row),)) for row in rows]


def side_by_side(examples: list[Example]) -> PackedRow:
    """Return one row of sequences without a common prefix."""
    alone = [row for item in examples for row in pack([item], len(item.token_ids))]
    starts = np.cumsum([0, *(len(row.token_ids) for row in alone)]).astype(np.int32)
    fields = ("token_ids", "positions", "targets", "old_logprobs", "advantages", "weights")
    together: dict[str, Any] = {name: np.concatenate([getattr(row, name) for row in alone]) for name in fields}
    return PackedRow(
        ends=np.concatenate([row.ends + start for row, start in zip(alone, starts, strict=False)]),
        sources=np.concatenate([row.sources + start for row, start in zip(alone, starts, strict=False)]),
        segments=np.concatenate([row.segments + index for index, row in enumerate(alone)]).astype(np.int32),
        **together,
    )


class Ours:
    """Dockyard's trainer, as a run uses it."""

    name = "dockyard"

    def __init__(self, base: Any, *, offload: bool = False) -> None:
        self.trainer = TrainerConfig(lr=1e-5, lora_r=16, lora_alpha=32, offload=offload)
        self.policy = Policy(base, self.trainer, GRPOConfig(kl_coef=0), temperature=1.0, seed=0)

    def update(self, examples: list[Example], *, shared: bool = True, row_tokens: int | None = None) -> None:
        """Run packing, loss, gradients and the optimizer step. The rows are those of a run unless given."""
        row_tokens = row_tokens or self.trainer.micro_batch_tokens
        self.policy.train_on(plant(examples, row_tokens) if shared else unshared(examples, row_tokens), lr=1e-5)

    def reference(self, examples: list[Example]) -> None:
        for tree in plant(examples, self.trainer.micro_batch_tokens):
            self.policy._network.reference(tree, 1.0)

    def close(self) -> None:
        """Restore the base model, so that other systems do not run the compiled layers."""
        for layer in self.policy.model.unload().model.layers:
            replace_call(layer, None)


class Plain:
    """Plain PEFT: one sequence at a time, activation checkpointing, all logits."""

    name = "transformers + PEFT"

    def __init__(self, base: Any) -> None:
        base.set_attn_implementation("sdpa")
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model: Any = get_peft_model(base, config)
        self.model.gradient_checkpointing_enable()
        self.model.enable_input_require_grads()
        self.model.train()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-5)

    def logprobs(self, item: Example) -> torch.Tensor:
        ids = torch.from_numpy(item.token_ids).long().to(self.model.device)
        logits = self.model(input_ids=ids[None], use_cache=False, logits_to_keep=len(item.targets) + 1).logits[0, :-1]
        return torch.log_softmax(logits.float(), -1).gather(1, ids[item.targets][:, None])[:, 0]

    def update(self, examples: list[Example]) -> None:
        self.optimizer.zero_grad()
        for item in examples:
            logprobs = self.logprobs(item)
            ratio = (logprobs - torch.from_numpy(item.old_logprobs).to(logprobs.device)).exp()
            loss = torch.maximum(-ratio * item.advantage, -ratio.clamp(0.8, 1.28) * item.advantage).sum() * item.weight
            loss.backward()
        self.optimizer.step()

    def reference(self, examples: list[Example]) -> None:
        with torch.no_grad(), self.model.disable_adapter():
            for item in examples:
                self.logprobs(item)

    def close(self) -> None:
        self.model.gradient_checkpointing_disable()
        self.model.unload()


class Trl:
    """The loss of TRL's GRPOTrainer with its defaults, on the batches that its loop would make of these sequences."""

    name = "TRL"

    def __init__(self, base: Any) -> None:
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl.trainer.grpo_config import GRPOConfig as TrlConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        base.set_attn_implementation("sdpa")
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
            pad_token="<pad>",
            eos_token="<eos>",
        )
        on_gpu = base.device.type == "cuda"
        settings = TrlConfig(
            output_dir=mkdtemp(), per_device_train_batch_size=1, num_generations=2, generation_batch_size=2,
            report_to="none", bf16=on_gpu, use_cpu=not on_gpu, beta=0.0,
        )  # fmt: skip
        self.trainer: Any = GRPOTrainer(
            model=base,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": "a"}]),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        self.model: Any = self.trainer.model
        self.model.gradient_checkpointing_enable()
        self.model.enable_input_require_grads()
        self.model.train()
        self.trainer.current_gradient_accumulation_steps = 1
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-5)

    def _inputs(self, item: Example) -> dict[str, torch.Tensor]:
        device = self.model.device
        ids = torch.from_numpy(item.token_ids).long().to(device)[None]
        num = len(item.targets)
        return {
            "prompt_ids": ids[:, :-num],
            "prompt_mask": torch.ones_like(ids[:, :-num]),
            "completion_ids": ids[:, -num:],
            "completion_mask": torch.ones_like(ids[:, -num:]),
            "advantages": torch.tensor([item.advantage], device=device),
            "old_per_token_logps": torch.from_numpy(item.old_logprobs).to(device)[None],
            "num_items_in_batch": torch.tensor(float(num), device=device),
        }

    def update(self, examples: list[Example]) -> None:
        self.optimizer.zero_grad()
        for item in examples:
            with self.trainer.compute_loss_context_manager():
                loss = self.trainer._compute_loss(self.model, self._inputs(item))
            loss.backward()
        self.optimizer.step()

    def reference(self, examples: list[Example]) -> None:
        for item in examples:
            ids = torch.from_numpy(item.token_ids).long().to(self.model.device)[None]
            with torch.no_grad(), self.model.disable_adapter(), self.trainer.compute_loss_context_manager():
                self.trainer._get_per_token_logps_and_entropies(
                    self.model, ids, torch.ones_like(ids), len(item.targets)
                )

    def close(self) -> None:
        self.model.gradient_checkpointing_disable()
        self.model.unload()
        self.trainer.model = self.trainer.model_wrapped = None


SYSTEMS: dict[str, Any] = {"ours": Ours, "trl": Trl, "plain": Plain}


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


class Table:
    """Prints each line as soon as it is measured, and saves all lines to a file."""

    def __init__(self, out: Path | None) -> None:
        self._out, self._figures = out, list[Figure]()
        print("| tokens | system | s | tokens/s | MFU | peak GiB | reference pass s |\n|---|---|---|---|---|---|---|")

    def add(self, figure: Figure) -> None:
        print(figure.line(), flush=True)
        self._figures.append(figure)
        if self._out:
            self._out.write_text(json.dumps([asdict(item) for item in self._figures], indent=1))


def measure_lengths(base: Any, name: str, lengths: list[int], table: Table, device: str) -> None:
    """Measure sequences of which a quarter is the prompt and the rest is sampled."""
    system = SYSTEMS[name](base)
    for length in lengths:
        rng = np.random.default_rng(length)
        work = [example(rng, rng.integers(0, 150_000, length // 4), length - length // 4)]
        warm = name == "ours" or length == lengths[0]  # others compile nothing
        repeats = 2 if length < 65_536 else 1  # long ones: no noise
        found = timed(lambda work=work: system.update(work), device, repeats=repeats, warm=warm)
        passed = timed(lambda work=work: system.reference(work), device) if found else None
        seconds, peak = found or (None, None)
        table.add(
            Figure(
                system=system.name,
                what=f"{length:,}",
                tokens=length,
                seconds=seconds,
                mfu=flops(base, [length]) / seconds / PEAK_FLOPS if seconds else None,
                peak_gib=peak,
                reference_s=passed[0] if passed else None,
            )
        )
        free(device)
    system.close()
    free(device)


def measure_group(base: Any, names: list[str], table: Table, device: str, scale: int) -> None:
    """Measure eight rollouts with a common prefix, as agents make them."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 150_000, PREFIX // scale)
    group = [example(rng, prompt, OWN // scale) for _ in range(GROUP)]
    lengths = [len(item.token_ids) for item in group]
    what = f"{GROUP} x ({PREFIX // scale:,} + {OWN // scale:,})"
    for name in names:
        system = SYSTEMS[name](base)
        for way, options in {"": {}}.items() if name != "ours" else OUR_WAYS.items():
            work = partial(system.update, group, **options)
            found = timed(work, device, warm=name == "ours")
            seconds, peak = found or (None, None)
            figure = Figure(system=system.name + way, what=what, tokens=sum(lengths), seconds=seconds, peak_gib=peak)
            table.add(figure)
            free(device)
        system.close()
        free(device)


def all_heads(module: Any, query: Any, key: Any, value: Any, attention_mask: None, **more: Any) -> tuple[Any, None]:
    """Attention for transformers in float32, for which torch's fused kernel does not support grouped heads."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.transpose(1, 2).contiguous(), None


def measure_gradients(device: str, tiny: bool) -> None:
    """How far the group's gradients are from those in float32, one sequence at a time, of the same two layers.

    As in a first update, old logprobs are the policy's own (float32's). Embeddings are as large as what layers add to
    them, as in trained models: made as small as other weights, the tokens of a long random text become all alike in
    the first layer, and rounding is most of what is left of them.
    """
    AttentionInterface.register("all_heads", all_heads)
    scale = 64 if tiny else 1
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 150_000, PREFIX // scale)
    group = [example(rng, prompt, OWN // scale) for _ in range(GROUP)]
    shape: dict[str, Any] = SIZES["tiny" if tiny else "7b"] | {"num_hidden_layers": 2}
    config = Qwen2Config(vocab_size=152_064, num_key_value_heads=4, max_position_embeddings=131_072, **shape)
    torch.manual_seed(0)
    with torch.device(device):
        weights: Any = Qwen2ForCausalLM(config).requires_grad_(False)
    weights.get_input_embeddings().weight.normal_()
    exact: Any = None
    print("| gradients | distance from float32 | cosine |\n|---|---|---|")
    for name, system_of, dtype, options in (
        ("transformers + PEFT, float32", Plain, torch.float32, {}),
        ("transformers + PEFT, bfloat16", Plain, torch.bfloat16, {}),
        ("dockyard, not shared, bfloat16", Ours, torch.bfloat16, {"shared": False}),
        ("dockyard, shared, bfloat16", Ours, torch.bfloat16, {"shared": True}),
    ):
        system = system_of(copy.deepcopy(weights).to(dtype))
        if isinstance(system, Plain) and dtype == torch.float32:
            system.model.set_attn_implementation("all_heads")
        model = system.policy.model if isinstance(system, Ours) else system.model
        torch.manual_seed(1)
        trained = [p for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            for parameter in trained:
                parameter.copy_(torch.randn(parameter.shape) * 0.02)
            if exact is None:
                assert isinstance(system, Plain)
                group = [replace(item, old_logprobs=system.logprobs(item).cpu().numpy()) for item in group]
        system.update(group, **options)
        grads = torch.cat([parameter.grad.double().flatten() for parameter in trained])
        exact = grads if exact is None else exact
        distance = float((grads / grads.norm() - exact / exact.norm()).norm())
        cosine = float(torch.nn.functional.cosine_similarity(grads, exact, dim=0))
        print(f"| {name} | {distance:.5f} | {cosine:.6f} |", flush=True)
        del system, model, trained
        free(device)


def measure_head(device: str, tiny: bool) -> None:
    """Measure logprobs of 16k tokens and their gradients: Dockyard against Liger's kernel and all logits at once."""
    liger: Any = import_module("liger_kernel.transformers.functional")  # nothing else here needs it

    num, hidden, vocab = (16_384, 3584, 152_064) if not tiny else (64, 56, 500)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weight_VD = torch.randn(vocab, hidden, device=device, dtype=dtype) * 0.02
    hidden_ND = torch.randn(num, hidden, device=device, dtype=dtype, requires_grad=True)
    targets_N = torch.randint(0, vocab, (num,), device=device)

    def all_at_once() -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden_ND, weight_VD).float()
        return torch.log_softmax(logits, -1).gather(1, targets_N[:, None])[:, 0]

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "dockyard (with entropy and top-1)": lambda: _Head.apply(hidden_ND, weight_VD, targets_N, 1.0, True)[0],
        "Liger": lambda: -liger.liger_fused_linear_cross_entropy(hidden_ND, weight_VD, targets_N, reduction="none"),
        "all logits at once": all_at_once,
    }
    print("| head | ms | peak GiB |\n|---|---|---|")
    for name, logprobs in ways.items():
        work = lambda logprobs=logprobs: torch.autograd.grad(logprobs().sum(), hidden_ND)  # noqa: E731
        found = timed(work, device, repeats=5, warm=True)
        print(f"| {name} | {found[0] * 1000:.0f} | {found[1]:.1f} |" if found else f"| {name} | does not fit | |")
        free(device)


def measure_moe(table: Table, device: str, tiny: bool) -> None:
    """Measure Qwen3-Coder-30B-A3B's shape."""
    shape: dict[str, Any] = (
        {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
         "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        if not tiny else
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    )  # fmt: skip
    config = Qwen3MoeConfig(vocab_size=151_936, max_position_embeddings=262_144, **shape)
    base = random_model(config, Qwen3MoeForCausalLM, device)
    length = 16_384 if not tiny else 64
    rng = np.random.default_rng(0)
    work = [example(rng, rng.integers(0, 150_000, length // 4), length - length // 4)]
    system = Ours(base)
    found = timed(lambda: system.update(work), device, repeats=2, warm=True)
    seconds, peak = found or (None, None)
    table.add(Figure(system="dockyard", what=f"30B-A3B, {length:,}", tokens=length, seconds=seconds, peak_gib=peak))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,16384,32768,65536,131072")
    parser.add_argument("--systems", default="ours,trl,plain")
    parser.add_argument("--parts", default="lengths,shared,head,gradients,moe")
    parser.add_argument("--size", default="7b", choices=list(SIZES), help="`tiny` shows on a CPU that it runs")
    parser.add_argument("--card-gib", type=float, help="leave this much of the GPU's memory, as a smaller card has")
    parser.add_argument("--offload", action="store_true", help="`trainer.offload` for ours")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    SYSTEMS["ours"] = partial(Ours, offload=arguments.offload)
    if arguments.card_gib:
        num = int(torch.cuda.mem_get_info()[0] - arguments.card_gib * 2**30)
        TAKEN.append(torch.empty(num, dtype=torch.uint8, device="cuda"))
    names = arguments.systems.split(",")
    table = Table(arguments.out)
    if "lengths" in arguments.parts or "shared" in arguments.parts:
        base = policy_model(arguments.size, device)
        for name in names if "lengths" in arguments.parts else []:
            measure_lengths(base, name, [int(length) for length in arguments.lengths.split(",")], table, device)
        if "shared" in arguments.parts:
            measure_group(base, names, table, device, 1 if arguments.size == "7b" else 64)
        del base
        free(device)
    if "head" in arguments.parts:
        measure_head(device, tiny=arguments.size == "tiny")
    if "gradients" in arguments.parts:
        measure_gradients(device, tiny=arguments.size == "tiny")
    if "moe" in arguments.parts:
        measure_moe(table, device, tiny=arguments.size == "tiny")


if __name__ == "__main__":
    main()
