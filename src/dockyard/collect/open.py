"""Open what makes rollouts: the model's files, the engine or endpoint, environments, gateway and pool.

An agent that calls no model needs no engine, and torch is imported only for the embedded engine.
"""

import logging
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from dockyard.callbacks import RunCallbacks
from dockyard.config import EngineConfig, ModelConfig, RunConfig
from dockyard.engine.custom import check_engine
from dockyard.engine.model_dir import find_model
from dockyard.engine.open import EngineSpec, check_embedded, open_engine
from dockyard.engine.openai import TextEndpoint
from dockyard.engine.protocol import Engine
from dockyard.errors import DockyardError, EngineError, UsageError
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.server import Gateway
from dockyard.gateway.text_session import TextSource, session_factory
from dockyard.rollout.agents.wiring import MODEL_NAME, asks_no_model, check_agent, runs_inside
from dockyard.rollout.environments import Site, check_environment, open_site, reachable
from dockyard.rollout.pool import RolloutPool
from dockyard.rollout.sandbox.launch import VISIBLE
from dockyard.rollout.trial import OnChange, Phases, TrialRunner
from dockyard.run_dir.run import RunDir
from dockyard.types import Json, Rollout

logger = logging.getLogger(__name__)


class NoModel:
    """Implements `TextSource` for agents that call no model, such as `oracle`."""

    down_s = 0.0

    async def chat(self, body: Json) -> Json:
        raise EngineError("this run has no model", hint="`--agent.name` names an agent that needs none")


def check_run(config: RunConfig) -> None:
    """Raise an error if the agent, the engine or the environment cannot run, before anything starts."""
    check_agent(config.agent)
    check_engine(config.engine)
    if config.environment.type == "sandbox":
        _check_hidden(config)
    check_environment(config.environment, config.gateway, agent=config.agent.name, inside=runs_inside(config.agent))


def _check_hidden(config: RunConfig) -> None:
    """Refuse folders among the host's programs, which every sandbox can read: tests and solutions must be hidden."""
    tasks = config.tasks
    for setting, folder in (
        ("run_dir", config.run_dir),
        ("tasks.train", tasks.train),
        ("tasks.heldout", tasks.heldout),
    ):
        if folder and any(folder.resolve().is_relative_to(place) for place in VISIBLE):
            raise UsageError(
                f"`{setting}` is `{folder}`, which every task in a `sandbox` could read: it is below /usr",
                hint="move it, for example below /home or /workspace, or `--environment.type docker`",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The files of a model on this machine, and the renderer of its prompts."""

    folder: Path
    """Holds the tokenizer, and the weights if they are needed here."""
    renderer: Renderer


def find_files(model: ModelConfig, engine: EngineConfig) -> ModelFiles | None:
    """Find a model's files, downloading them if necessary.

    Returns None for a model without a tokenizer here, which only an `openai` endpoint may serve: as text.
    """
    if engine.type == "transformers":
        check_embedded()
    try:
        folder = find_model(model.name, weights=engine.launch or not engine.is_server)
        return ModelFiles(folder=folder, renderer=Renderer.load(folder, model.name))
    except DockyardError as error:
        if engine.type != "openai":
            raise
        logger.warning(
            "no tokenizer for %s here: text mode, no token ids or logprobs, nothing to train on exactly (%s)",
            model.name,
            error,
        )
        return None


@dataclass(frozen=True, slots=True)
class PolicySource:
    """What the gateway samples from. It is a source of text if there is no renderer."""

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
    opening = open_runner(config, engine, renderer, run=run.id, trials=run.paths.trials, on_phase=on_phase)
    async with opening as runner:
        transcribe = renderer.transcript if renderer else _no_transcript
        watch = callbacks.rollout_finished if callbacks else None
        yield RolloutPool(runner=runner, run=run, config=config.rollout, transcribe=transcribe, watch=watch)


@asynccontextmanager
async def open_runner(
    config: RunConfig,
    engine: Engine | TextSource,
    renderer: Renderer | None,
    *,
    trials: Path,
    run: str | None = None,
    on_phase: OnChange | None = None,
) -> AsyncGenerator[TrialRunner]:
    """Open what makes single rollouts, for callers with a loop of their own.

    `run` is the run's id, if there is one. `on_phase` is called with the number of rollouts in each phase.
    """
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
            phases=Phases(config.rollout, on_phase) if on_phase else Phases(config.rollout),
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
        raise UsageError(message, hint="`--gateway.port 0` uses a free port") from error


def _no_transcript(_: Rollout) -> str:
    """Return an empty transcript: the rollout's tokens are not known."""
    return ""
