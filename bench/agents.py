"""Real agents, one rollout each: the training rows from the gateway, and from re-rendering every prompt.

Re-rendering means that each call's prompt is the agent's history rendered again by the same renderer, with reasoning
kept, and that two calls share a row only if the ids of one are a prefix of the other's. Prints one table:

    sh tools/install-agents.sh && python bench/agents.py [AGENT ...]
"""

# pyright: reportMissingImports=false

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from aiohttp import ClientSession, web

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import conftest  # noqa: F401 - its settings keep Harbor from calling home
from agent_clis import Desk
from agent_stories import STORIES, STORY_END, open_session, renderer, served, terminus_2
from scripted_policy import Drawn, ScriptedEngine, assert_trained_as_drawn, lines, tokenizer

from dockyard.gateway.dialects.chat import ChatDialect
from dockyard.gateway.dialects.messages import MessagesDialect
from dockyard.gateway.dialects.responses import ResponsesDialect
from dockyard.gateway.protocol import AdvertisedModel
from dockyard.gateway.server import Gateway
from dockyard.types import IntArray, Prompt, Segment

TERMINUS = "terminus-2"
DIALECTS = {"/v1/chat/completions": ChatDialect, "/v1/messages": MessagesDialect, "/v1/responses": ResponsesDialect}


@dataclass(frozen=True, slots=True)
class Overheard:
    """A proxy to the gateway that records the requests of agents."""

    url: str
    prompts: list[Prompt] = field(default_factory=list)


@asynccontextmanager
async def overheard(gateway: Gateway) -> AsyncGenerator[Overheard]:
    heard = Overheard("")

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        if request.path in DIALECTS:
            dialect = DIALECTS[request.path](AdvertisedModel("policy", str))
            heard.prompts.append(dialect.parse(json.loads(body)).prompt)
        url = gateway.root_url + request.path_qs
        async with client.request(request.method, url, data=body, headers=request.headers) as answer:
            return web.Response(
                body=await answer.read(), status=answer.status, headers={"Content-Type": answer.content_type}
            )

    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with ClientSession() as client:
        yield Overheard(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", heard.prompts)
    await runner.cleanup()


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that a trainer would get."""

    count: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.count} | {self.tokens:,}"


def rows_of(segments: Sequence[Segment]) -> Rows:
    return Rows(len(segments), sum(len(segment.token_ids) for segment in segments))


def rendered_rows(prompts: Sequence[Prompt], sampled: Sequence[IntArray]) -> Rows:
    """Return the rows if every prompt is rendered again: those that are not a prefix of a later prompt."""
    starts = [renderer("qwen3").prompt(prompt) for prompt in prompts]
    whole = [np.concatenate(pair) for pair in zip(starts, sampled, strict=True)]
    leaves = [ids for at, ids in enumerate(whole) if not any(_begins(later, ids) for later in starts[at + 1 :])]
    return Rows(len(leaves), sum(map(len, leaves)))


def _begins(ids: IntArray, beginning: IntArray) -> bool:
    return np.array_equal(ids[: len(beginning)], beginning)


def canonical(ids: IntArray) -> IntArray:
    """Return the same text in the tokenizer's canonical tokens."""
    text = tokenizer().decode(ids.tolist(), skip_special_tokens=False)
    return np.array(tokenizer().encode(text, add_special_tokens=False).ids, np.int32)


async def run(name: str, folder: Path) -> tuple[list[Drawn], list[Prompt], Sequence[Segment]]:
    """Run one rollout: what the engine sampled, what the agent requested, what would be trained."""
    story = terminus_2() if name == TERMINUS else STORIES[name][0](folder / "work")
    engine = ScriptedEngine(lines(*story))
    async with served(engine) as gateway, overheard(gateway) as heard:
        if name == TERMINUS:
            from terminus_trial import attempt

            segments = (await attempt(gateway, folder, STORY_END, api_base=heard.url)).segments
        else:
            session = open_session(gateway)
            await STORIES[name][1](Desk(folder, heard.url, session.key))
            segments = gateway.close_session(session).segments
    assert_trained_as_drawn(engine, segments)
    return engine.drawn, heard.prompts, segments


async def report(names: Sequence[str]) -> None:
    print(
        "| agent | calls | sampled | rows | tokens | re-rendered: rows | tokens | canonical sampling: rows | tokens |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in names:
        with TemporaryDirectory() as folder:
            drawn, prompts, segments = await run(name, Path(folder))
        sampled = [one.generation.token_ids for one in drawn]
        ours, drifting = rows_of(segments), rendered_rows(prompts, sampled)
        steady = rendered_rows(prompts, [canonical(ids) for ids in sampled])
        print(f"| {name} | {len(drawn)} | {sum(map(len, sampled)):,} | {ours} | {drifting} | {steady} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*STORIES, TERMINUS]
    parser.add_argument("agents", nargs="*", metavar="AGENT", help=f"by default all: {', '.join(known)}")
    asyncio.run(report(parser.parse_args().agents or known))


if __name__ == "__main__":
    main()
