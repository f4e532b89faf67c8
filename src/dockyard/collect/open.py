"""From settings to rollouts: environments, gateway and pool, opened together and closed together."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from dockyard.config import RunConfig
from dockyard.engine.protocol import Engine
from dockyard.errors import EngineError, UsageError
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.server import Gateway
from dockyard.gateway.text_session import TextSource
from dockyard.rollout.agents.wiring import MODEL_NAME, check_agent, runs_inside
from dockyard.rollout.environments import Site, check_environment, open_site, reachable
from dockyard.rollout.pool import RolloutPool
from dockyard.rollout.trial import OnChange, Phases, TrialRunner
from dockyard.run_dir.run import RunDir
from dockyard.types import Json, Rollout


class NoModel:
    """Implements `TextSource` for agents that ask no model, such as `oracle`."""

    down_s = 0.0

    async def chat(self, body: Json) -> Json:
        raise EngineError("this run has no model", hint="`--agent.name` names an agent that needs none")


def check_run(config: RunConfig) -> None:
    """Refuse an agent or an environment that cannot run, before anything starts."""
    check_agent(config.agent)
    check_environment(config.environment, config.gateway, agent=config.agent.name, inside=runs_inside(config.agent))


@asynccontextmanager
async def open_pool(
    config: RunConfig,
    run: RunDir,
    engine: Engine | TextSource,
    renderer: Renderer | None,
    on_phase: OnChange | None = None,
) -> AsyncGenerator[RolloutPool]:
    """A pool whose rollouts sample from this engine. `renderer` is None where the engine is a source of text."""
    phases = Phases(config.rollout, on_phase) if on_phase else Phases(config.rollout)
    async with open_runner(config, engine, renderer, run=run.id, trials=run.paths.trials, phases=phases) as runner:
        yield RolloutPool(runner=runner, run=run, config=config.rollout, transcribe=transcriber(renderer))


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
    """What makes one rollout after another, for whoever owns the loop; `run` is the run's own name, if it has one."""
    inside = runs_inside(config.agent)
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(open_site(config.environment, inside=inside, run=run))
        gateway = Gateway(engine, renderer, MODEL_NAME)
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
    """How a rollout is shown to people: nothing, where its tokens are not known."""
    return renderer.transcript if renderer else lambda _: ""
