"""Everything on one GPU: vLLM, the gateway, Harbor trials in sandboxes and the trainer. Measures a step by phase,
first synchronously, then with rollouts that continue during the update.

Without `--model` it uses Qwen2.5-7B's shape with random weights (vLLM's differ from the trainer's: only time is
measured). Rollouts have `--turns` model calls, each followed by a command that sleeps `--sandbox-s` in the sandbox.

A step is the time between two recordings, including the second (`rest_s`). `generating_s`: vLLM had a request;
`engine_tokens_per_s` is over that time. `idle_share`: there was neither a request nor an update. `gpu_share`: the
driver reported a kernel. `..._a_rollout`: the mean over rollouts of waiting for vLLM, and of the agent's whole time.

    python bench/one_gpu.py --out one_gpu.json
    python bench/one_gpu.py --out one_gpu.json --steps 4    measures more steps
    python bench/one_gpu.py --command "python -m vllm.entrypoints.cli.main serve"
    python bench/one_gpu.py --size tiny --tasks 2 --group 4 --new-tokens 16 --sandbox-s 0.3    tests this script
"""

import argparse
import asyncio
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("HARBOR_TELEMETRY", "off")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM
from update import random_model

from dockyard.collect.task_sets import task_sets
from dockyard.config import EngineConfig, ModelConfig, RunConfig
from dockyard.engine.checks import ServerRequirements
from dockyard.engine.model_dir import find_model
from dockyard.engine.open import connect
from dockyard.engine.protocol import ContextOverflow, GenerateRequest, Generation
from dockyard.engine.remote_engine import RemoteEngine
from dockyard.engine.vllm_process import serving
from dockyard.engine.weights import load_model
from dockyard.gateway.render.renderer import Renderer
from dockyard.run_dir.run import RunDir
from dockyard.trainer.display import TrainingProgress
from dockyard.trainer.learner import LocalLearner
from dockyard.trainer.loop import Learner, train
from dockyard.trainer.modes import RemoteMode, RunInputs
from dockyard.trainer.policy import Policy
from dockyard.trainer.record import StepRecord
from dockyard.types import Group

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODES = {"sync": 0, "async": 1}
SIZES: dict[str, dict[str, Any]] = {
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152_064},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 1024},
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEST = "echo $(( $(cksum < /app/reply.txt | cut -d' ' -f1) % 4 )) > /logs/verifier/reward.txt\n"


def shape(size: str) -> Qwen2Config:
    return Qwen2Config(
        **SIZES[size], max_position_embeddings=32_768, architectures=["Qwen2ForCausalLM"], dtype=dtype(), eos_token_id=2
    )


def dtype() -> torch.dtype:
    return torch.bfloat16 if DEVICE == "cuda" else torch.float32


def write_shape(folder: Path, size: str) -> Path:
    """Write a model folder without weights. Each byte is a token; the other tokens occur only by sampling."""
    folder.mkdir()
    config = shape(size)
    config.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *letters]
    names += [f"~{number}" for number in range(len(names), config.vocab_size or 0)]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    return folder


def write_tasks(folder: Path, count: int, prompt_tokens: int) -> Path:
    """Write tasks whose instructions are digits, which most tokenizers encode one by one."""
    for index in range(count):
        numbers = " ".join(str(index * 1000 + number) for number in range(prompt_tokens))[:prompt_tokens]
        for name, text in {
            "task.toml": f'schema_version = "1.4"\n[task]\nname = "bench/task-{index}"\n',
            "instruction.md": f"Go on with these: {numbers}\n",
            "environment/Dockerfile": "FROM scratch\n",
            "tests/test.sh": TEST,
        }.items():
            file = folder / f"task-{index:03}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return folder


class Meter:
    """Measures for how long at least one of several overlapping activities was running."""

    def __init__(self) -> None:
        self._count, self._since, self._total = 0, 0.0, 0.0

    @contextmanager
    def on(self) -> Iterator[None]:
        now = time.monotonic()
        self._since = self._since if self._count else now
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._total += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        return self._total + (time.monotonic() - self._since if self._count else 0.0)


@dataclass
class Meters:
    """Totals of engine and trainer since the start."""

    generating: Meter = field(default_factory=Meter)
    busy: Meter = field(default_factory=Meter)
    """A request in the engine, or an update."""
    sampled: int = 0
    waited_s: float = 0.0
    """For the engine, all calls together."""

    def read(self) -> dict[str, float]:
        return {
            "generating_s": self.generating.seconds,
            "busy_s": self.busy.seconds,
            "sampled": self.sampled,
            "waited_s": self.waited_s,
        }


class MeteredEngine:
    """Implements `Engine` over vLLM."""

    def __init__(self, engine: RemoteEngine, meters: Meters) -> None:
        self._engine, self._meters = engine, meters

    @property
    def context_length(self) -> int:
        return self._engine.context_length

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def down_s(self) -> float:
        return self._engine.down_s

    async def generate(self, request: GenerateRequest) -> Generation | ContextOverflow:
        start = time.monotonic()
        with self._meters.generating.on(), self._meters.busy.on():
            result = await self._engine.generate(request)
        self._meters.waited_s += time.monotonic() - start
        if isinstance(result, Generation):
            self._meters.sampled += len(result.token_ids)
        return result

    async def publish(self, adapter_dir: Path, version: int) -> None:
        await self._engine.publish(adapter_dir, version)

    async def close(self) -> None:
        await self._engine.close()


@dataclass(slots=True, kw_only=True)
class MeteredLearner(LocalLearner):
    """The learner of a run, with its updates measured."""

    meters: Meters

    async def update(self, groups: tuple[Group, ...]) -> dict[str, float]:
        with self.meters.busy.on():
            return await LocalLearner.update(self, groups)


class Gpu:
    """Asks the driver twice a second for the share of time with a running kernel, and the memory of all processes."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        if DEVICE == "cuda" and shutil.which("nvidia-smi"):
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        query = ["--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", "-lms", "500"]
        with subprocess.Popen(["nvidia-smi", *query], stdout=subprocess.PIPE, text=True) as smi:
            assert smi.stdout
            for line in smi.stdout:
                share, mib = (float(cell) for cell in line.split(","))
                self.samples.append((time.monotonic(), share / 100, mib / 1024))

    def between(self, start: float, end: float) -> dict[str, float]:
        found = [sample for sample in self.samples if start <= sample[0] <= end]
        if not found:
            return {}
        return {"gpu_share": fmean(share for _, share, _ in found), "gpu_gib": max(gib for _, _, gib in found)}


@dataclass(kw_only=True)
class Bench:
    """One server and one policy, through several modes."""

    args: argparse.Namespace
    folder: Path
    model_dir: Path
    engine: EngineConfig
    policy: Policy
    meters: Meters = field(default_factory=Meters)
    gpu: Gpu = field(default_factory=Gpu)
    rows: list[dict[str, Any]] = field(default_factory=list)

    async def run(self, mode: str) -> None:
        config = settings(self.args, self.folder, self.model_dir, MODES[mode])
        self.policy.version = 0  # the adapters go on as they are: only time is measured
        with RunDir.create(self.folder / mode, config) as run, TrainingProgress(config.steps) as progress:
            renderer = Renderer.load(self.model_dir, config.model.name)
            inputs = RunInputs(run=run, tasks=task_sets(run), recorded=(), model_dir=self.model_dir, renderer=renderer)
            async with RemoteMode(self.open_learner).open(inputs, progress) as parts:
                kept = StepRecord(run, progress, parts.learner, nothing_due, lambda step, numbers: None)
                await parts.learner.publish()
                # One step less than there are: rollouts of the next are under way in the last that is measured, too.
                await train(config.steps - 1, parts.rollouts, parts.learner, MeteredRecord(self, mode, kept))

    @asynccontextmanager
    async def open_learner(self, run: RunDir) -> AsyncGenerator[Learner]:
        wanted = wanted_of(run.config, self.model_dir)
        server = await connect(self.engine, wanted)
        assert isinstance(server, RemoteEngine)
        engine = MeteredEngine(server, self.meters)
        try:
            yield MeteredLearner(policy=self.policy, engine=engine, run=run, config=run.config, meters=self.meters)
        finally:
            await engine.close()

    def save(self, summary: dict[str, Any] | None = None) -> None:
        if self.args.out:
            settings = {name: str(value) for name, value in vars(self.args).items()}
            found = {"machine": machine(), "settings": settings, "steps": self.rows, "summary": summary}
            self.args.out.write_text(json.dumps(found, indent=1))


async def nothing_due(version: int) -> dict[str, float]:
    return {}


class MeteredRecord:
    """Implements `Record`: a row for each step, saved immediately."""

    def __init__(self, bench: Bench, mode: str, kept: StepRecord) -> None:
        self._bench, self._mode, self._kept = bench, mode, kept
        self._start, self._read = time.monotonic(), bench.meters.read()

    async def record(self, step: int, groups: tuple[Group, ...], metrics: dict[str, float]) -> None:
        await self._kept.record(step, groups, metrics)
        bench, end, now = self._bench, time.monotonic(), self._bench.meters.read()
        spent = {name: now[name] - value for name, value in self._read.items()}
        seconds = {name: metrics[f"time/{name}_s"] for name in ("collect", "update", "publish")}
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        step_s = end - self._start
        row = {
            "mode": self._mode,
            "step": step,
            "measured": step >= num_warmup(bench.args, MODES[self._mode]),
            "step_s": step_s,
            **{f"{name}_s": value for name, value in seconds.items()},
            "rest_s": step_s - sum(seconds.values()),
            "generating_s": spent["generating_s"],
            "engine_tokens_per_s": spent["sampled"] / max(spent["generating_s"], 1e-9),
            "idle_share": 1 - spent["busy_s"] / step_s,
            "sampled_tokens": spent["sampled"],
            "packed_tokens": metrics["train/packed_tokens"],
            "generation_s_a_rollout": spent["waited_s"] / max(len(rollouts), 1),
            "agent_s_a_rollout": fmean(rollout.seconds.get("agent", 0.0) for rollout in rollouts),
            "lost": sum(rollout.reward is None for rollout in rollouts),
            "staleness": self._kept.run.read_metrics()[-1]["rollout/staleness"],
            "trainer_peak_gib": peak_gib(),
            **bench.gpu.between(self._start, end),
        }
        self._start, self._read = end, now
        bench.rows.append(row)
        bench.save()
        print(line(row), flush=True)


def peak_gib() -> float | None:
    """Return the peak of this process since the last call."""
    if DEVICE != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


COLUMNS = (
    "step_s", "collect_s", "update_s", "publish_s", "rest_s", "generating_s", "engine_tokens_per_s", "idle_share",
    "gpu_share", "packed_tokens", "generation_s_a_rollout", "agent_s_a_rollout", "trainer_peak_gib", "gpu_gib",
)  # fmt: skip


def line(row: dict[str, Any]) -> str:
    cells = [f"{row[name]:,.2f}" if isinstance(row.get(name), float) else "" for name in COLUMNS]
    return f"| {row['mode']} | {row['step']} | {' | '.join(cells)} |"


def num_warmup(args: argparse.Namespace, max_staleness: int) -> int:
    """Return the number of steps until everything is compiled and rollouts start as early as they can."""
    return args.warmup + max_staleness


def settings(args: argparse.Namespace, folder: Path, model_dir: Path, max_staleness: int) -> RunConfig:
    at_once = args.tasks * args.group * (max(MODES.values()) + 1)  # those of a step, and those started early
    agent = {
        "turns": args.turns,
        "sandbox_s": args.sandbox_s,
        "spread": args.sandbox_spread,
        "observed": args.observed_tokens,
    }
    return RunConfig.model_validate(
        {
            "steps": num_warmup(args, max_staleness) + args.steps + 1,
            "model": {"name": str(model_dir), "device": DEVICE},
            "tasks": {"train": folder / "tasks"},
            "agent": {"name": "one_gpu_agent:TurnsAgent", "kwargs": agent},
            "sampling": {"max_new_tokens": args.new_tokens},
            "engine": {
                "type": "vllm",
                "launch": True,
                "command": shlex.split(args.command),
                "memory_share": args.memory_share,
                "context_length": args.context_length,
                "args": [*([] if args.model else ["--load-format", "dummy"]), *shlex.split(args.vllm_args)],
            },
            "rollout": {"concurrency": at_once, "max_staleness": max_staleness},
            "grpo": {"group_size": args.group, "tasks_per_step": args.tasks, "kl_coef": args.kl_coef},
            "trainer": {"lr": 1e-5, "micro_batch_tokens": args.micro_batch_tokens},
        }
    )


def wanted_of(config: RunConfig, model_dir: Path) -> ServerRequirements:
    return ServerRequirements.of(config.model.name, model_dir, config.trainer.lora_r, config.rollout.max_staleness + 1)


def summarise(rows: list[dict[str, Any]], sandbox_s: float) -> dict[str, float]:
    """Return the means over the measured steps of each mode, and their ratio."""

    def mean(mode: str, name: str) -> float:
        return fmean(row[name] for row in rows if row["mode"] == mode and row["measured"])

    found: dict[str, float] = {"sandbox s a rollout": sandbox_s}
    for mode in dict.fromkeys(row["mode"] for row in rows):
        for name in COLUMNS:
            if all(isinstance(row.get(name), float) for row in rows if row["mode"] == mode and row["measured"]):
                found[f"{mode}: {name}"] = mean(mode, name)
        measured = [row for row in rows if row["mode"] == mode and row["measured"]]
        sampled, seconds = (sum(row[name] for row in measured) for name in ("sampled_tokens", "generating_s"))
        found[f"{mode}: engine_tokens_per_s"] = sampled / seconds
    if {"sync: step_s", "async: step_s"} <= found.keys():
        collect, update, took = mean("sync", "collect_s"), mean("sync", "update_s"), found["async: step_s"]
        found["sync / async"] = found["sync: step_s"] / took
        # Two steps' rollouts may be under way at once. 1 is a GPU that generates and updates as if each had it alone.
        ideal = max(update, (collect + update) / 2)
        found["overlap efficiency: max(update, (collect + update) / 2) of sync / step of async"] = ideal / took
        found["update of async / update of sync"] = mean("async", "update_s") / update
    return found


def machine() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {os.cpu_count()} cores"


async def measure(args: argparse.Namespace, folder: Path) -> None:
    model_dir = find_model(args.model) if args.model else write_shape(folder / "model", args.size)
    write_tasks(folder / "tasks", args.tasks, args.prompt_tokens)
    config = settings(args, folder, model_dir, max(MODES.values()))
    started = time.monotonic()
    log = args.out.with_suffix(".vllm.log") if args.out else folder / "vllm.log"
    async with serving(config.engine, config.model, model_dir, wanted_of(config, model_dir), log) as engine:
        print(f"vLLM ready after {time.monotonic() - started:.0f} s", flush=True)
        base = (
            load_model(model_dir, ModelConfig(device=DEVICE))
            if args.model
            else random_model(shape(args.size), Qwen2ForCausalLM, DEVICE)
        )
        policy = Policy(base, config.trainer, config.grpo, temperature=config.sampling.temperature, seed=config.seed)
        bench = Bench(args=args, folder=folder, model_dir=model_dir, engine=engine, policy=policy)
        print(f"| mode | step | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")
        for mode in args.modes.split(","):
            await bench.run(mode)
        summary = summarise(bench.rows, args.turns * args.sandbox_s)
        bench.save(summary)
    for name, value in summary.items():
        print(f"| {name} | {value:,.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="a model folder or `smollm2-135m`, instead of random weights")
    add("--size", choices=list(SIZES), default="7b", help="of random weights")
    add("--modes", default="sync,async")
    add("--steps", type=int, default=2, help="measured in each mode, an even number")
    add("--warmup", type=int, default=1, help="steps before those")
    add("--tasks", type=int, default=16)
    add("--group", type=int, default=8)
    add("--turns", type=int, default=3)
    add("--prompt-tokens", type=int, default=512)
    add("--new-tokens", type=int, default=128)
    add("--observed-tokens", type=int, default=128, help="printed by a command")
    add("--sandbox-s", type=float, default=3.5, help="that a command takes, on average")
    add("--sandbox-spread", type=float, default=0.0, help="0.5: commands take from half to one and a half times that")
    add("--kl-coef", type=float, default=0.001)
    add("--micro-batch-tokens", type=int, default=16_384)
    add("--memory-share", type=float, default=0.4, help="of the GPU, for vLLM")
    add("--context-length", type=int, default=4096)
    add("--command", default="vllm serve", help="what starts vLLM")
    add("--vllm-args", default="", help="more of vLLM's options: `--vllm-args=--enforce-eager`")
    add("--out", type=Path, help="a JSON file, written after each step")
    args = parser.parse_args()
    if args.steps < 1 or args.steps % (max(MODES.values()) + 1):
        parser.error(f"--steps {args.steps}: an even number, since with staleness short and long steps alternate")
    with tempfile.TemporaryDirectory(prefix="dockyard-bench-") as folder:
        asyncio.run(measure(args, Path(folder)))


if __name__ == "__main__":
    main()
