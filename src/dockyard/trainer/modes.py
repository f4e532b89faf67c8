"""The parts of a training run, opened and closed together: engine, gateway, policy, and the source of rollouts.

The policy is in this process or elsewhere; if elsewhere, nothing here needs torch.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from dockyard.collect.open import open_pool
from dockyard.collect.task_sets import TaskSets
from dockyard.config import EngineConfig, RunConfig
from dockyard.engine.checks import ServerRequirements
from dockyard.engine.open import connect
from dockyard.engine.openai import TextEndpoint
from dockyard.engine.protocol import Engine
from dockyard.engine.remote_engine import RemoteEngine
from dockyard.engine.vllm_process import serving
from dockyard.errors import UsageError
from dockyard.gateway.render.renderer import Renderer
from dockyard.run_dir.run import RunDir
from dockyard.trainer.display import TrainingProgress
from dockyard.trainer.loop import Rollouts, ServedLearner, TaskRollouts
from dockyard.trainer.recorded import RecordedRollouts, TextRollouts
from dockyard.types import Group

logger = logging.getLogger(__name__)

_TIMID_LR, _BOLD_LR = 1e-5, 1e-4


def check_method(config: RunConfig, *, elsewhere: bool, attempting: bool) -> None:
    """Refuse what cannot be done, and warn of what rarely goes well.

    `elsewhere`: the policy is on another machine. `attempting`: the run makes rollouts of its own.
    """
    method, lr = config.trainer.method, config.trainer.lr
    if method == "full":
        _refuse_engine(config, elsewhere=elsewhere, attempting=attempting)
        if lr > _BOLD_LR:
            logger.warning("`trainer.lr` is %g: above %g all weights of a model soon fall apart", lr, _BOLD_LR)
        return
    if method == "qlora" and not elsewhere:
        from dockyard.engine.weights import check_installed  # with torch, which a policy elsewhere does without

        check_installed()
    if 0 < lr < _TIMID_LR:
        logger.warning("`trainer.lr` is %g: below %g a LoRA barely moves", lr, _TIMID_LR)
    if method == "qlora" and attempting and config.engine.type != "transformers":
        logger.warning(
            "the trainer's base weights have 4 bits, those of `engine.type` `%s` do not: `train/mismatch_kl` says each "
            "step how far apart they are; `--engine.type transformers` samples from the trainer's own",
            config.engine.type,
        )


def _refuse_engine(config: RunConfig, *, elsewhere: bool, attempting: bool) -> None:
    """All weights go to the embedded engine only: others take adapters."""
    if elsewhere:
        raise UsageError(
            "`trainer.method` is `full`, and a policy on another machine sends adapters only",
            hint="`--env modal` runs all of it there; `--trainer.method lora` trains an adapter",
        )
    if attempting and config.engine.type != "transformers":
        raise UsageError(
            f"`trainer.method` is `full`, but `engine.type` `{config.engine.type}` takes adapters only",
            hint="`--engine.type transformers` takes all weights; `--trainer.method lora` trains an adapter",
        )


type OpenLearner = Callable[[RunDir], AbstractAsyncContextManager[ServedLearner]]
"""Opens a learner with an engine of its own, for the run in this folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """What was found before the model is loaded."""

    tasks: TaskSets
    recorded: tuple[Group, ...]
    """What to learn from instead of tasks, if anything."""
    model_dir: Path
    renderer: Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A run at work."""

    rollouts: Rollouts
    learner: ServedLearner
    attempts: TaskRollouts | None
    """Makes held-out rollouts; None where nothing makes any."""
    foreign: str | None
    """Whose rollouts are trained on, if not the policy's own."""


@asynccontextmanager
async def open_parts(
    config: RunConfig, run: RunDir, inputs: RunInputs, progress: TrainingProgress, elsewhere: OpenLearner | None = None
) -> AsyncGenerator[Parts]:
    """All of them, ended with the block. Only what makes rollouts needs an engine."""
    attempting = not inputs.recorded or bool(inputs.tasks.heldout)
    async with AsyncExitStack() as stack:
        server = None
        if attempting and not elsewhere:
            engine = await stack.enter_async_context(_serving(config, run, inputs.model_dir))
            server = await open_server(config.model_copy(update={"engine": engine}), inputs.model_dir)
        if server:
            stack.push_async_callback(server.close)
        opening = elsewhere(run) if elsewhere else _open_here(config, run, inputs, progress, server, attempting)
        learner = await stack.enter_async_context(opening)
        source = (server or learner.engine) if attempting else None
        attempts = await stack.enter_async_context(_attempts(config, run, source, inputs, progress)) if source else None
        yield Parts(
            rollouts=_rollouts(run, inputs, attempts, server, progress),
            learner=learner,
            attempts=attempts,
            foreign=_foreign(config, inputs, server),
        )


def _open_here(
    config: RunConfig,
    run: RunDir,
    inputs: RunInputs,
    progress: TrainingProgress,
    server: RemoteEngine | TextEndpoint | None,
    attempting: bool,
) -> AbstractAsyncContextManager[ServedLearner]:
    from dockyard.trainer.learner import Served, open_learner

    served = Served.NOT if not attempting or isinstance(server, TextEndpoint) else server or Served.HERE
    return open_learner(config, run, inputs.model_dir, progress.say, served=served, recorded=inputs.recorded)


@asynccontextmanager
async def _attempts(
    config: RunConfig, run: RunDir, engine: Engine | TextEndpoint, inputs: RunInputs, progress: TrainingProgress
) -> AsyncGenerator[TaskRollouts]:
    renderer = None if isinstance(engine, TextEndpoint) else inputs.renderer
    async with open_pool(config, run, engine, renderer, progress.phases) as pool:
        attempts = TaskRollouts(pool=pool, tasks=inputs.tasks.train, config=config, progress=progress)
        try:
            yield attempts
        finally:
            await attempts.close()


def _rollouts(
    run: RunDir,
    inputs: RunInputs,
    attempts: TaskRollouts | None,
    server: RemoteEngine | TextEndpoint | None,
    progress: TrainingProgress,
) -> Rollouts:
    """Where a step's groups come from."""
    if inputs.recorded:
        return RecordedRollouts(groups=inputs.recorded, run=run, progress=progress)
    assert attempts is not None
    return TextRollouts(attempts, inputs.renderer) if isinstance(server, TextEndpoint) else attempts


def _foreign(config: RunConfig, inputs: RunInputs, server: RemoteEngine | TextEndpoint | None) -> str | None:
    if inputs.recorded:
        return f"rollouts come from `{config.tasks.dataset}`"
    if isinstance(server, TextEndpoint):
        return f"rollouts come from `{config.engine.url}`, which gets no new weights"
    return None


def _serving(config: RunConfig, run: RunDir, model_dir: Path) -> AbstractAsyncContextManager[EngineConfig]:
    if not config.engine.launch:
        return nullcontext(config.engine)
    return serving(config.engine, config.model, model_dir, _wanted(config, model_dir), run.paths.engine_log)


def _wanted(config: RunConfig, model_dir: Path) -> ServerRequirements:
    return ServerRequirements.of(config.model.name, model_dir, config.trainer.lora_r, config.rollout.max_staleness + 1)


async def open_server(config: RunConfig, model_dir: Path) -> RemoteEngine | TextEndpoint | None:
    """The server that the settings name, checked before any weights are loaded; None for the embedded engine."""
    if config.engine.type == "transformers":
        return None
    wanted = _wanted(config, model_dir)
    server = await connect(config.engine, wanted)
    if config.engine.type == "openai" and isinstance(server, RemoteEngine):
        # It tells token ids, as vLLM does; only its own routes take new weights.
        await server.close()
        logger.info("%s tells token ids: it is trained with as a vLLM server", config.engine.url)
        return await connect(config.engine.model_copy(update={"type": "vllm"}), wanted)
    return server
