"""The gateway in front of a real vLLM server: exactness and overhead.

    python bench/engine_vllm.py [MODEL] --python PYTHON_WITH_VLLM      starts a server
    python bench/engine_vllm.py [MODEL] --url http://localhost:8000    uses a running server

Exactness: logprobs of recorded segments against the training forward pass, before and after an adapter was published
during the rollouts. Speed: sampled tokens per second of rollouts through the gateway, against the same requests sent
directly to vLLM's own chat endpoint.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from dockyard.config import EngineConfig, ModelConfig
from dockyard.engine.checks import ServerRequirements
from dockyard.engine.model_dir import find_model
from dockyard.engine.open import connect
from dockyard.engine.weights import load_adapter, load_model
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.server import Gateway
from dockyard.gateway.sessions import TokenSessions
from dockyard.types import Segment

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command in a shell and returns what it prints.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
RANK = 16


@contextmanager
def server(python: str, model_dir: Path, dtype: str, flags: list[str]) -> Iterator[tuple[str, float]]:
    """Start a vLLM server, and measure how long that takes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "policy", "--dtype", dtype, "--max-model-len", "4096"]
    command += ["--enable-lora", "--max-lora-rank", str(RANK), "--logprobs-mode", "processed_logprobs"]
    command += ["--max-logprobs", "5", "--enable-prefix-caching", *flags]
    environment = os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "2"}
    started = time.monotonic()
    with open("vllm-server.log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        while not answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() - started > 300:
                sys.exit("vLLM did not start; see vllm-server.log")
            time.sleep(1)
        yield url, time.monotonic() - started
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except OSError:
        return False


def save_random_adapter(model: Any, folder: Path, seed: int) -> None:
    """Save a random LoRA that is large enough to change every logprob."""
    torch.manual_seed(seed)
    config = LoraConfig(r=RANK, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.03)
    adapted.save_pretrained(str(folder))
    adapted.unload()


@torch.no_grad()
def logprobs_of(model: Any, segment: Segment) -> np.ndarray:
    """Return the logprob of each sampled token in the training forward pass (temperature 1)."""
    ids = torch.tensor(segment.token_ids[None].astype(np.int64), device=model.device)
    logits = model(ids).logits[0, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    return chosen.cpu().numpy()[segment.sampled[1:]]


async def chat(http: aiohttp.ClientSession, url: str, key: str, messages: list[Any], **fields: Any) -> Any:
    body = {"model": "policy", "messages": messages} | fields
    async with http.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def rollout(
    http: aiohttp.ClientSession, url: str, key: str, name: int, turns: int, **fields: Any
) -> list[tuple[float, int]]:
    """One agent that answers every reply with a word; the seconds and sampled tokens of each call.

    Without tools: vLLM's own endpoint would need a parser named for them, and gets the same prompts this way.
    """
    messages: list[Any] = [
        {"role": "system", "content": "You work in a shell. " * 30},
        {"role": "user", "content": f"Task {name}: list the files, then count the lines of each."},
    ]
    calls: list[tuple[float, int]] = []
    for turn in range(turns):
        started = time.monotonic()
        answer = await chat(http, url, key, messages, **fields)
        calls.append((time.monotonic() - started, answer["usage"]["completion_tokens"]))
        message = answer["choices"][0]["message"]
        messages.append({"role": "assistant", "content": message["content"] or ""})
        messages.append({"role": "user", "content": f"Go on, {turn}."})
    return calls


async def measure(args: argparse.Namespace, model_dir: Path, url: str) -> dict[str, Any]:
    config = EngineConfig(type="vllm", url=url)
    engine: Any = await connect(config, ServerRequirements.of(args.model, model_dir, RANK))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = load_model(model_dir, ModelConfig(device=device, dtype=args.dtype))
    gateway = Gateway(TokenSessions(engine, Renderer.load(model_dir, args.model)), "policy")
    await gateway.start()
    timeout = aiohttp.ClientTimeout(total=500)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        with TemporaryDirectory() as folder:
            figures = await exactness(args, gateway, engine, base, http, Path(folder))
        figures |= await speed(args, gateway, http, f"{url}/v1")
    await gateway.close()
    await engine.close()
    return figures


async def exactness(
    args: argparse.Namespace, gateway: Gateway, engine: Any, base: Any, http: aiohttp.ClientSession, folder: Path
) -> dict[str, Any]:
    """Run rollouts of three turns; new weights are published before the third."""
    sampling = {"temperature": 1.0, "max_new_tokens": args.max_new_tokens}
    sessions = [gateway.open_session(f"exact-{n}", seed=n, **sampling) for n in range(args.checked)]
    adapters = [folder / "first", folder / "second"]
    for seed, adapter in enumerate(adapters):
        save_random_adapter(base, adapter, seed)
    await engine.publish(adapters[0], 1)
    histories = await asyncio.gather(*(converse(http, gateway.url, s.key, [], turns=2) for s in sessions))
    await engine.publish(adapters[1], 2)
    pairs = zip(sessions, histories, strict=True)
    await asyncio.gather(*(converse(http, gateway.url, s.key, history, turns=1) for s, history in pairs))
    recordings = [gateway.close_session(session) for session in sessions]
    assert [len(recording.segments) for recording in recordings] == [1] * args.checked
    segments = [recording.segments[0] for recording in recordings]
    right, wrong = differences(base, adapters, segments)
    return {
        "segments per rollout": 1,
        "sampled tokens compared": len(right),
        "of which drawn after the second publish": int(sum((s.versions == 2).sum() for s in segments)),
        "mean |logprob difference|": float(np.mean(right)),
        "largest |logprob difference|": float(np.max(right)),
        "mean |difference| to the other weights": float(np.mean(wrong)),
    }


async def converse(http: aiohttp.ClientSession, url: str, key: str, history: list[Any], turns: int) -> list[Any]:
    """Continue a conversation and return it."""
    history = history or [{"role": "user", "content": "List the files here, then count their lines."}]
    for turn in range(turns):
        message = (await chat(http, url, key, history, tools=[TOOL]))["choices"][0]["message"]
        said = {"role": "assistant", "content": message["content"] or "", "tool_calls": message.get("tool_calls")}
        history = [*history, {name: value for name, value in said.items() if value is not None}]
        for call in message.get("tool_calls") or []:
            history.append({"role": "tool", "tool_call_id": call["id"], "content": "a.txt b.txt"})
        history.append({"role": "user", "content": f"Go on, {turn}."})
    return history


def differences(base: Any, adapters: list[Path], segments: list[Segment]) -> tuple[np.ndarray, np.ndarray]:
    """Compare recorded with recomputed logprobs: with the weights that sampled each token, and with the others."""
    recomputed: list[list[np.ndarray]] = []
    for adapter in adapters:
        model = load_adapter(base, adapter)
        recomputed.append([logprobs_of(model, segment) for segment in segments])
        base = model.unload()
    right: list[np.ndarray] = []
    wrong: list[np.ndarray] = []
    for index, segment in enumerate(segments):
        assert segment.logprobs is not None
        assert segment.versions is not None
        recorded, version = segment.logprobs[segment.sampled], segment.versions[segment.sampled]
        first, second = (of_adapter[index] for of_adapter in recomputed)
        right.append(np.abs(recorded - np.where(version == 1, first, second)))
        wrong.append(np.abs(recorded - np.where(version == 1, second, first)))
    return np.concatenate(right), np.concatenate(wrong)


async def speed(args: argparse.Namespace, gateway: Gateway, http: aiohttp.ClientSession, direct: str) -> dict[str, Any]:
    """Run the same rollouts through the gateway and directly on the server, each warmed up, alternating."""
    figures: dict[str, Any] = {}
    sampling = {"temperature": 1.0, "max_new_tokens": args.max_new_tokens}
    async with http.get(f"{direct}/models") as response:
        adapter = next(card["id"] for card in (await response.json())["data"] if card.get("parent"))
    asked = {"model": adapter, "temperature": 1.0, "max_tokens": args.max_new_tokens}
    asked |= {"logprobs": True, "return_token_ids": True}  # what training needs
    rates: dict[str, list[float]] = {"gateway": [], "direct": []}
    latencies: dict[str, list[float]] = {"gateway": [], "direct": []}
    for repeat in range(args.repeats + 1):
        for kind in rates:
            started = time.monotonic()
            names = range(repeat * args.sessions, (repeat + 1) * args.sessions)
            if kind == "gateway":
                sessions = [gateway.open_session(f"s{name}", seed=name, **sampling) for name in names]
                keys, url, extra = [session.key for session in sessions], gateway.url, {}
            else:
                sessions, keys, url, extra = [], ["none"] * args.sessions, direct, asked
            jobs = [rollout(http, url, key, n, args.turns, **extra) for n, key in zip(names, keys, strict=True)]
            calls = [call for one in await asyncio.gather(*jobs) for call in one]
            elapsed = time.monotonic() - started
            closed = [gateway.close_session(session) for session in sessions]
            if kind == "gateway":
                figures["gateway: segments a rollout"] = sum(len(r.segments) for r in closed) / len(closed)
                cpu_us = sum(recording.stats["cpu_us"] for recording in closed)
                figures["gateway: CPU ms a call"] = cpu_us / 1000 / (args.sessions * args.turns)
            if repeat:  # the first is for warming up
                rates[kind].append(sum(tokens for _, tokens in calls) / elapsed)
                latencies[kind].append(median(seconds for seconds, _ in calls))
    for kind in rates:
        figures[f"{kind}: sampled tokens/s"] = median(rates[kind])
        figures[f"{kind}: seconds a call, median"] = median(latencies[kind])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--python", default=sys.executable, help="one that has vLLM (default: this one)")
    parser.add_argument("--url")
    parser.add_argument(
        "--flags", default="", help="more flags for the server, such as `--enable-scale-out` from 0.30 on"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--checked", type=int, default=8, help="rollouts whose logprobs are recomputed")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model_dir = find_model(args.model)
    if args.url:
        figures = asyncio.run(measure(args, model_dir, args.url))
    else:
        with server(args.python, model_dir, args.dtype, args.flags.split()) as (url, seconds):
            figures = {"server start, s": seconds} | asyncio.run(measure(args, model_dir, url))
    print(f"{args.model}, {args.dtype}, {args.sessions} rollouts x {args.turns} turns x {args.max_new_tokens} tokens")
    for name, value in figures.items():
        print(f"| {name} | {value:.4g} |" if isinstance(value, float) else f"| {name} | {value} |")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
