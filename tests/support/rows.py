"""Many small rollouts at once in one kind of environment: each row is a task, a script for the policy, and settings."""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from docker_engine import BASE
from gateway_fakes import FakeEngine, Said, tiny_renderer
from trials import write_task

from dockyard.config import AgentConfig, EnvironmentConfig, GatewayConfig, RolloutConfig, RunConfig
from dockyard.engine.protocol import ContextOverflow, Engine
from dockyard.gateway.server import Gateway
from dockyard.gateway.sessions import TokenSessions
from dockyard.rollout import pool as pool_module
from dockyard.rollout.agents.wiring import runs_inside
from dockyard.rollout.docker.docker_cli import ask
from dockyard.rollout.docker.site import RUN_LABEL
from dockyard.rollout.environments import Site, open_site, reachable
from dockyard.rollout.plan import Attempt, RolloutPlan
from dockyard.rollout.pool import RolloutPool
from dockyard.rollout.sandbox.check import check_sandbox
from dockyard.rollout.trial import Phases, TrialRunner
from dockyard.run_dir.run import RunDir
from dockyard.types import Rollout

AT_ONCE = 3
IMAGE = f"FROM {BASE}\nWORKDIR /app\n"
GRADE = """#!/bin/bash
reward=0
if [ -f /app/answer.txt ] && [ "$(cat /app/answer.txt)" = "$(cat /tests/answer.txt)" ]; then
  reward=1
fi
sleep 0.2
echo "$reward" > /logs/verifier/reward.txt
sleep 0.2
"""
"""As task authors write it. The pauses stand for real tests, which take their time."""
ANSWER = "forty-two"
SOLVE = f"echo {ANSWER} > /app/answer.txt"

AGENT, POLICY_USE, LIMITS = AgentConfig(), GatewayConfig(), RolloutConfig(retries=1)

type Line = str | Said | Exception | ContextOverflow
type OpenEngine = Callable[["Row"], AbstractAsyncContextManager[Engine]]


@asynccontextmanager
async def scripted(row: "Row"):
    """An engine that says the row's lines, bash commands in a fence."""
    yield FakeEngine([Said(f"```bash\n{line}\n```", pieces=64) if isinstance(line, str) else line for line in row.says])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rollout: what the policy says, what grades it, what it runs in. And, for the table of blame, its end."""

    name: str
    says: tuple[Line, ...] = ()
    """Commands of the policy, one a turn, or what the engine does instead."""
    test: str = GRADE
    image: str = IMAGE
    toml: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """More of the task folder."""
    agent: AgentConfig = AGENT
    limits: RolloutConfig = LIMITS
    policy_use: GatewayConfig = POLICY_USE
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Of Harbor's environment settings."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Of the environment's constructor."""
    engine: OpenEngine = scripted
    seal: bool = True
    level: str = "standard"
    """Of the seal in Docker."""
    trials_dir: Callable[[Path], Path] = lambda folder: folder / "trials"
    where: tuple[str, ...] = ("docker", "sandbox")
    cause: str | None = None
    """None: no failure."""
    reward: float | None = 0.0
    """None: dropped."""
    num_tries: int = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """How a row went."""

    rollout: Rollout
    num_tries: int


@dataclass(slots=True, kw_only=True)
class RowRunner:
    """Each try has an engine and a gateway of its own, so that the script begins again."""

    row: Row
    site: Site
    folder: Path
    num_tries: int = 0

    async def run(self, attempt: Attempt) -> Rollout:
        self.num_tries += 1
        row = self.row
        inside = runs_inside(row.agent)
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(row.engine(row))
            gateway = Gateway(TokenSessions(engine, tiny_renderer()), "policy")
            stack.push_async_callback(gateway.close)
            first, *others = self.site.listen
            await gateway.start(first, also=others)
            url = await stack.enter_async_context(reachable(gateway, self.site, row.policy_use, inside=inside))
            trial = TrialRunner(
                gateway=gateway,
                agents_url=url,
                agent=row.agent,
                site=self.site,
                seal=row.seal,
                limits=row.limits,
                phases=Phases(row.limits),
                max_new_tokens=2000,
                trials_dir=row.trials_dir(self.folder),
                policy_use=row.policy_use,
            )
            return await trial.run(attempt)


async def run_row(row: Row, site: Site, folder: Path) -> Seen:
    """Through the pool, which tries what is worth it again."""
    task = write_task(folder / "task", row.test, row.image, toml=row.toml, **_files(row))
    runner = RowRunner(row=row, site=_own(site, row), folder=folder)
    plan = RolloutPlan(phase="step-00000", tasks=[task], group_size=1, temperature=1.0, seed=0, stream="s")
    config = row.limits.model_copy(update={"max_lost_share": 1.0})
    with closing(RunDir.create(folder / "run", RunConfig())) as run:
        pool = RolloutPool(runner=runner, run=run, config=config, transcribe=lambda rollout: rollout.task)
        [group] = await pool.collect(plan, lambda _: None)
    return Seen(group.rollouts[0], runner.num_tries)


def _files(row: Row) -> dict[str, str]:
    return {"tests/answer.txt": f"{ANSWER}\n", "solution/solve.sh": f"{SOLVE}\n", **row.files}


def _own(site: Site, row: Row) -> Site:
    environment = site.environment
    sealed = {"seal_level": row.level} if "seal_level" in environment.kwargs else {}
    changes: dict[str, Any] = {"kwargs": {**environment.kwargs, **sealed, **row.kwargs}, **row.overrides}
    return Site(environment=environment.model_copy(update=changes), listen=site.listen, host=site.host)


@dataclass(frozen=True, slots=True)
class Batch:
    """What came of many rows."""

    seen: dict[str, Seen | BaseException]
    left_behind: list[str]
    """Containers or processes that nobody ended before the site was closed."""

    def __getitem__(self, name: str) -> Seen:
        result = self.seen[name]
        if isinstance(result, BaseException):
            raise result
        return result


async def run_rows(rows: Iterable[Row], kind: str, folder: Path) -> Batch:
    """Some at a time; what goes wrong with one is seen at that one only."""
    rows = list(rows)
    slots = asyncio.Semaphore(AT_ONCE)
    async with AsyncExitStack() as stack:
        sites = {
            inside: await stack.enter_async_context(open_site(environment_of(kind, inside=inside), inside=inside))
            for inside in sorted({runs_inside(row.agent) for row in rows})
        }

        async def run_one(row: Row) -> Seen:
            async with slots:
                return await run_row(row, sites[runs_inside(row.agent)], folder / row.name)

        results = await asyncio.gather(*map(run_one, rows), return_exceptions=True)
        left = await left_behind(kind, list(sites.values()))
    return Batch({row.name: result for row, result in zip(rows, results, strict=True)}, left)


def environment_of(kind: str, *, inside: bool = False) -> EnvironmentConfig:
    """`docker`, or a mechanism of `sandbox`."""
    network = ("gateway" if kind == "docker" else "public") if inside else "none"
    which = {"type": "docker"} if kind == "docker" else {"type": "sandbox", "sandbox": kind}
    return EnvironmentConfig.model_validate({**which, "network": network})


def skip_unless_possible(mechanism: str) -> str:
    """For a fixture: the mechanism, where this machine has it."""
    if problem := check_sandbox(mechanism):  # pyright: ignore[reportArgumentType]
        pytest.skip(problem.message)
    return mechanism


async def left_behind(kind: str, sites: Sequence[Site]) -> list[str]:
    """Of these sites, or of this process."""
    if kind != "docker":
        return _children()
    runs = [site.environment.kwargs["run"] for site in sites]
    shown = [
        await ask("ps", "--all", "--filter", f"label={RUN_LABEL}={run}", "--format", "{{.ID}} {{.Names}}")
        for run in runs
    ]
    return [line for text in shown for line in text.splitlines()]


def _children() -> list[str]:
    """Command lines of what this process started and that still runs."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if int(parent) == os.getpid() and ("--unshare-pid" in command or command.startswith("sandbox -S")):
            found.append(command)
    return found


def run_chosen(request: pytest.FixtureRequest, rows: Iterable[Row], kind: str, folder: Path) -> Batch:
    """For a module's fixture: those rows alone whose tests were asked for, by their parameter `row`."""
    mine = [item for item in request.session.items if item.path == request.path]
    chosen = {item.callspec.params.get("row") for item in mine if isinstance(item, pytest.Function) and _has_spec(item)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "_FIRST_WAIT_S", 0.05)
        return asyncio.run(run_rows([row for row in rows if row.name in chosen], kind, folder))


def _has_spec(item: pytest.Function) -> bool:
    return hasattr(item, "callspec")


def names(rows: Iterable[Row], kind: str) -> list[str]:
    return [row.name for row in rows if kind in row.where]
