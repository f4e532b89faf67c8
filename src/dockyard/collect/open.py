"""Open what makes rollouts: the policy's source of tokens or text, environments, gateway and pool.

An agent that calls no model needs no engine, and torch is imported only for the embedded engine.
"""

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from dockyard.callbacks import RunCallbacks
from dockyard.collect.model_files import ModelFiles, find_files
from dockyard.config import RunConfig
from dockyard.engine.open import EngineSpec, open_engine
from dockyard.engine.openai import TextEndpoint
from dockyard.engine.protocol import Engine
from dockyard.errors import EngineError, UsageError
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.server import Gateway
from dockyard.gateway.text_session import TextSource, session_factory
from dockyard.rollout.agents.rows import asks_no_model
from dockyard.rollout.agents.wiring import MODEL_NAME, check_agent, runs_inside
from dockyard.rollout.environments import Site, check_environment, open_site, reachable
from dockyard.rollout.pool import RolloutPool
from dockyard.rollout.sandbox.launch import VISIBLE
from dockyard.rollout.trial import OnChange, Phases, TrialRunner
from dockyard.run_dir.run import RunDir
from dockyard.types import Json, Rollout


class NoModel:
    """Implements `TextSource` for agents that call no model, such as `oracle`."""

    down_s = 0.0

    async def chat(self, body: Json) -> Json:
        raise EngineError("this run has no model", hint="`--agent.name` names an agent that needs none")


def check_run(config: RunConfig) -> None:
    """Refuse an agent or an environment that cannot run, before anything starts."""
    check_agent(config.agent)
    if config.environment.type == "sandbox":
        _check_hidden(
            {"run_dir": config.run_dir, "tasks.train": config.tasks.train, "tasks.heldout": config.tasks.heldout}
        )
    check_environment(config.environment, config.gateway, agent=config.agent.name, inside=runs_inside(config.agent))


def _check_hidden(folders: dict[str, Path | None]) -> None:
    """Sandboxes see the host's programs: what lies among them, tests and solutions included, every task could read."""
    for setting, folder in folders.items():
        if folder and any(folder.resolve().is_relative_to(place) for place in VISIBLE):
            raise UsageError(
                f"`{setting}` is `{folder}`, which every task in a `sandbox` could read: it lies below /usr",
                hint="move it, for example below /home or /workspace, or `--environment.type docker`",
            )


@dataclass(frozen=True, slots=True)
class PolicySource:
    """What the gateway samples from. Without a renderer it is a source of text."""

    engine: Engine | TextSource
    renderer: Renderer | None


def find_model_files(config: RunConfig) -> ModelFiles | None:
    """Find the files of the run's model; None for an agent that calls no model, and in text mode."""
    return None if asks_no_model(config.agent) else find_files(config.model, config.engine)


@asynccontextmanager
async def open_source(
    config: RunConfig, files: ModelFiles | None, adapter: Path | None = None, *, log: Path = Path(os.devnull)
) -> AsyncGenerator[PolicySource]:
    """Open the engine of rollouts that train nothing, with this adapter loaded.

    `log` receives the output of a vLLM server that is started for it.
    """
    if asks_no_model(config.agent):
        yield PolicySource(NoModel(), None)
        return
    spec = EngineSpec(
        engine=config.engine,
        model=config.model,
        model_dir=files.folder if files else None,
        lora_rank=config.trainer.lora_r,
        adapter=adapter,
        log=log,
    )
    async with open_engine(spec) as engine:
        yield PolicySource(engine, files.renderer if files and not isinstance(engine, TextEndpoint) else None)


@asynccontextmanager
async def open_pool(
    config: RunConfig,
    run: RunDir,
    engine: Engine | TextSource,
    renderer: Renderer | None,
    on_phase: OnChange | None = None,
    callbacks: RunCallbacks | None = None,
) -> AsyncGenerator[RolloutPool]:
    """Open a pool whose rollouts sample from this engine. `renderer` is None if the engine is a source of text."""
    watch = callbacks.rollout_finished if callbacks else None
    phases = Phases(config.rollout, on_phase) if on_phase else Phases(config.rollout)
    async with open_runner(config, engine, renderer, run=run.id, trials=run.paths.trials, phases=phases) as runner:
        yield RolloutPool(runner=runner, run=run, config=config.rollout, transcribe=transcriber(renderer), watch=watch)


@asynccontextmanager
async def open_runner(
    config: RunConfig,
    engine: Engine | TextSource,
    renderer: Renderer | None,
    *,
    trials: Path,
    run: str | None = None,
    phases: Phases | None = None,
) -> AsyncGenerator[TrialRunner]:
    """Open what makes single rollouts, for callers with a loop of their own. `run` is the run's id, if it has one."""
    inside = runs_inside(config.agent)
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(open_site(config.environment, inside=inside, run=run))
        gateway = Gateway(session_factory(engine, renderer), MODEL_NAME)
        stack.push_async_callback(gateway.close)
        await _listen(gateway, site, config.gateway.port)
        url = await stack.enter_async_context(reachable(gateway, site, config.gateway, inside=inside))
        yield TrialRunner(
            gateway=gateway,
            agents_url=url,
            agent=config.agent,
            site=site,
            limits=config.rollout,
            phases=phases or Phases(config.rollout),
            policy_use=config.gateway,
            max_new_tokens=config.sampling.max_new_tokens,
            trials_dir=trials,
            seal=config.environment.seal != "off",
        )


async def _listen(gateway: Gateway, site: Site, port: int) -> None:
    first, *others = site.listen
    try:
        await gateway.start(first, port, also=others)
    except OSError as error:
        message = f"`gateway.port` is {port}, where the gateway cannot listen: {error.strerror or error}"
        raise UsageError(message, hint="`--gateway.port 0` takes a free one") from error


def transcriber(renderer: Renderer | None) -> Callable[[Rollout], str]:
    """A function that renders a rollout for people: as an empty text if its tokens are not known."""
    return renderer.transcript if renderer else lambda _: ""
