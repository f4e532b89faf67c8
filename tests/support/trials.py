"""Real Harbor trials on small tasks, in any environment, with an engine of the test's."""

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from gateway_fakes import tiny_renderer

from dockyard.config import AgentConfig, EnvironmentConfig, GatewayConfig, RolloutConfig
from dockyard.engine.protocol import Engine
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.server import Gateway
from dockyard.gateway.sessions import TokenSessions
from dockyard.rollout.agents.wiring import runs_inside
from dockyard.rollout.environments import open_site, reachable
from dockyard.rollout.plan import Attempt
from dockyard.rollout.sandbox.check import choose_mechanism
from dockyard.rollout.trial import Phases, TrialRunner
from dockyard.types import Rollout, Task

TOML = 'schema_version = "1.4"\n[task]\nname = "test/task"\n'


NO_TMUX = "terminus-2 needs tmux: `apt-get install tmux`"


def skip_without_terminals() -> None:
    """For tests of terminus-2, which works in tmux."""
    if shutil.which("tmux") is None:
        pytest.skip(NO_TMUX)
    if not choose_mechanism().has_terminals:
        pytest.skip("a sandbox without namespaces has terminals only as root")


def write_task(folder: Path, test: str, dockerfile: str = "FROM scratch\n", *, toml: str = "", **files: str) -> Task:
    """A task whose tests/test.sh is `test`; further files by their path, with `__` for `/`."""
    texts = {
        "task.toml": TOML + toml,
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": test,
        **{name.replace("__", "/"): text for name, text in files.items()},
    }
    for name, text in texts.items():
        if text:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return Task(name=folder.name, path=folder, kind="k")


def attempt_at(task: Task, name: str = "a", *, index: int = 1) -> Attempt:
    return Attempt(name=name, task=task, group=0, index=index, seed=5, temperature=1.0)


@asynccontextmanager
async def trial_runner(
    engine: Engine,
    folder: Path,
    agent: AgentConfig | None = None,
    environment: EnvironmentConfig | None = None,
    *,
    limits: RolloutConfig | None = None,
    policy_use: GatewayConfig | None = None,
    max_new_tokens: int = 100,
    renderer: Renderer | None = None,
) -> AsyncGenerator[TrialRunner]:
    """What a run opens, without its folder and its pool. In a sandbox unless `environment` says otherwise."""
    agent, policy_use = agent or AgentConfig(), policy_use or GatewayConfig()
    inside = runs_inside(agent)
    async with open_site(environment or EnvironmentConfig(), inside=inside) as site:
        gateway = Gateway(TokenSessions(engine, renderer or tiny_renderer()), "policy")
        first, *others = site.listen
        await gateway.start(first, also=others)
        try:
            async with reachable(gateway, site, policy_use, inside=inside) as url:
                yield TrialRunner(
                    gateway=gateway,
                    agents_url=url,
                    agent=agent,
                    site=site,
                    limits=limits or RolloutConfig(),
                    phases=Phases(limits or RolloutConfig()),
                    max_new_tokens=max_new_tokens,
                    trials_dir=folder / "trials",
                    policy_use=policy_use,
                )
        finally:
            await gateway.close()


async def make_rollout(
    engine: Engine,
    folder: Path,
    test: str,
    dockerfile: str = "FROM scratch\n",
    *,
    toml: str = "",
    agent: AgentConfig | None = None,
    environment: EnvironmentConfig | None = None,
    limits: RolloutConfig | None = None,
) -> Rollout:
    """One rollout of one small task."""
    task = write_task(folder / "task", test, dockerfile, toml=toml)
    async with trial_runner(engine, folder, agent, environment, limits=limits) as runner:
        return await runner.run(attempt_at(task))
