"""The modes of a run: where rollouts come from, and where the policy is trained and served.

`choose_mode` decides once, and the mode it returns opens the parts that the loop needs:

    mode           rollouts are sampled by                      the policy is trained
    EmbeddedMode   the embedded engine, in this process         in this process; the engine shares its frozen weights
    ServedMode     a vLLM or SGLang server that takes adapters, in this process
                   or the user's own engine
    TextMode       an endpoint that returns text only           in this process; nothing serves it
    RemoteMode     the engine beside the policy                 on another machine
    RecordedMode   no engine: they are read from disk           as in one of the others, which attempts held-out tasks

torch and Harbor are imported when a mode is opened that needs them.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from dockyard.callbacks import RunCallbacks
from dockyard.collect.task_sets import TaskSets
from dockyard.config import EngineConfig, RunConfig
from dockyard.engine.custom import CheckedEngine
from dockyard.engine.open import EngineSpec, open_engine, text_endpoint, text_only_model
from dockyard.engine.openai import TextEndpoint
from dockyard.engine.protocol import Engine
from dockyard.errors import UsageError
from dockyard.gateway.render.renderer import Renderer
from dockyard.rl.reward import open_shaping
from dockyard.run_dir.run import RunDir
from dockyard.tasks.order import CustomOrder
from dockyard.trainer.display import TrainingProgress
from dockyard.trainer.loop import Learner, Rollouts, TaskRollouts
from dockyard.trainer.recorded import RecordedRollouts, TextRollouts
from dockyard.types import Group

logger = logging.getLogger(__name__)

_LOW_LR, _HIGH_LR = 1e-5, 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """What a run starts from, found before any weights are loaded."""

    run: RunDir
    tasks: TaskSets
    recorded: tuple[Group, ...]
    """The groups to train on if the rollouts are read from disk; empty otherwise."""
    model_dir: Path
    renderer: Renderer
    callbacks: RunCallbacks = field(default_factory=RunCallbacks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop and the evaluations of a run work with."""

    rollouts: Rollouts
    learner: Learner
    attempts: TaskRollouts | None
    """Makes held-out rollouts; None if the run attempts no tasks."""
    off_policy_source: str | None = None
    """Says where the rollouts come from if the policy did not sample them."""


type OpenLearner = Callable[[RunDir], AbstractAsyncContextManager[Learner]]
"""Opens a learner that has an engine of its own, for the run in this folder."""


@dataclass(frozen=True, slots=True)
class EmbeddedMode:
    """Policy and engine are in this process and share the frozen weights."""

    @asynccontextmanager
    async def open(self, inputs: RunInputs, progress: TrainingProgress) -> AsyncGenerator[Parts]:
        from dockyard.trainer.learner import open_embedded_learner

        opening = open_embedded_learner(inputs.run, inputs.model_dir, progress.say, recorded=inputs.recorded)
        async with opening as learner, _attempts(inputs, progress, learner.engine) as attempts:
            yield Parts(rollouts=attempts, learner=learner, attempts=attempts)


@dataclass(frozen=True, slots=True)
class ServedMode:
    """An engine samples that has weights of its own: a vLLM or SGLang server, or a user-defined class.

    It loads each version as a LoRA adapter.
    """

    engine: EngineConfig

    @asynccontextmanager
    async def open(self, inputs: RunInputs, progress: TrainingProgress) -> AsyncGenerator[Parts]:
        from dockyard.trainer.learner import load_learner

        # vLLM measures the free memory of the GPU while it starts, so it starts before the policy is loaded.
        async with open_engine(self.spec(inputs)) as engine:
            assert not isinstance(engine, TextEndpoint), "`choose_mode` has seen that this server returns token ids"
            learner = await load_learner(
                inputs.run, inputs.model_dir, progress.say, engine=engine, recorded=inputs.recorded
            )
            if isinstance(engine, CheckedEngine):
                await learner.check_engine(engine, self.spec(inputs).requirements().token_ids)
            async with _attempts(inputs, progress, engine) as attempts:
                yield Parts(rollouts=attempts, learner=learner, attempts=attempts)

    def spec(self, inputs: RunInputs) -> EngineSpec:
        """What the server must be able to do."""
        config = inputs.run.config
        return EngineSpec(
            engine=self.engine,
            model=config.model,
            model_dir=inputs.model_dir,
            lora_rank=config.trainer.lora_r,
            num_versions=config.rollout.max_staleness + 1,
            log=inputs.run.paths.engine_log,
        )


@dataclass(frozen=True, slots=True)
class TextMode:
    """An endpoint samples that returns no token ids and takes no weights. Its text is tokenized for the policy."""

    engine: EngineConfig
    model: str
    """The model's name there."""

    @asynccontextmanager
    async def open(self, inputs: RunInputs, progress: TrainingProgress) -> AsyncGenerator[Parts]:
        from dockyard.trainer.learner import load_learner

        endpoint = text_endpoint(self.engine, self.model)
        try:
            learner = await load_learner(
                inputs.run, inputs.model_dir, progress.say, engine=None, recorded=inputs.recorded
            )
            async with _attempts(inputs, progress, endpoint) as attempts:
                yield Parts(
                    rollouts=TextRollouts(attempts, inputs.renderer),
                    learner=learner,
                    attempts=attempts,
                    off_policy_source=f"rollouts come from `{self.engine.url}`, which gets no new weights",
                )
        finally:
            await endpoint.close()


@dataclass(frozen=True, slots=True)
class RemoteMode:
    """Policy and engine are on another machine; loop, gateway and rollouts are here."""

    open_learner: OpenLearner

    @asynccontextmanager
    async def open(self, inputs: RunInputs, progress: TrainingProgress) -> AsyncGenerator[Parts]:
        async with (
            self.open_learner(inputs.run) as learner,
            _attempts(inputs, progress, learner.engine) as attempts,
        ):
            yield Parts(rollouts=attempts, learner=learner, attempts=attempts)


type SamplingMode = EmbeddedMode | ServedMode | TextMode | RemoteMode


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMode:
    """The groups are read from disk. Only held-out tasks, if there are any, are attempted."""

    heldout: SamplingMode | None
    """Trains the policy and attempts held-out tasks; None if there are no held-out tasks."""
    open_learner: OpenLearner | None = None
    """Opens the learner if there are no held-out tasks. None loads it in this process, without an engine."""

    @asynccontextmanager
    async def open(self, inputs: RunInputs, progress: TrainingProgress) -> AsyncGenerator[Parts]:
        rollouts = RecordedRollouts(groups=inputs.recorded, run=inputs.run, progress=progress)
        source = f"rollouts come from `{inputs.run.config.tasks.dataset}`"
        if self.heldout:
            async with self.heldout.open(inputs, progress) as parts:
                yield replace(parts, rollouts=rollouts, off_policy_source=source)
        else:
            async with self._open_learner(inputs, progress) as learner:
                yield Parts(rollouts=rollouts, learner=learner, attempts=None, off_policy_source=source)

    @asynccontextmanager
    async def _open_learner(self, inputs: RunInputs, progress: TrainingProgress) -> AsyncGenerator[Learner]:
        if self.open_learner:
            async with self.open_learner(inputs.run) as learner:
                yield learner
        else:
            from dockyard.trainer.learner import load_learner

            yield await load_learner(inputs.run, inputs.model_dir, progress.say, engine=None, recorded=inputs.recorded)


type Mode = SamplingMode | RecordedMode


async def choose_mode(config: RunConfig, open_remote: OpenLearner | None = None) -> Mode:
    """Decide how this run works. `open_remote` opens a learner on another machine.

    An `openai` endpoint is sent one short completion, because only its answer says whether it returns token ids.
    """
    if not makes_rollouts(config):
        return RecordedMode(heldout=None, open_learner=open_remote)
    mode = await _sampling_mode(config.engine, open_remote)
    return RecordedMode(heldout=mode) if config.tasks.source == "recorded" else mode


async def _sampling_mode(engine: EngineConfig, open_remote: OpenLearner | None) -> SamplingMode:
    if open_remote:
        return RemoteMode(open_remote)
    if engine.type == "transformers":
        return EmbeddedMode()
    if engine.type != "openai":
        return ServedMode(engine)
    if model := await text_only_model(engine):
        return TextMode(engine, model)
    logger.info("%s returns token ids: it is used as a vLLM server", engine.url)
    return ServedMode(engine.model_copy(update={"type": "vllm"}))  # whose routes also take new weights


@asynccontextmanager
async def _attempts(
    inputs: RunInputs, progress: TrainingProgress, engine: Engine | TextEndpoint | None
) -> AsyncGenerator[TaskRollouts]:
    """Open what attempts the run's tasks with this engine."""
    from dockyard.collect.open import open_pool  # imports Harbor

    assert engine is not None, "a learner of this mode has an engine"
    config = inputs.run.config
    renderer = None if isinstance(engine, TextEndpoint) else inputs.renderer
    tasks, order = inputs.tasks.train, config.tasks.order
    choose = CustomOrder(reference=order, tasks=tasks, run=inputs.run).due if order else None
    shaping = open_shaping(config.grpo, inputs.renderer, inputs.run.paths.trials)
    async with open_pool(config, inputs.run, engine, renderer, progress.phases, inputs.callbacks) as pool:
        attempts = TaskRollouts(
            pool=pool, tasks=tasks, config=config, progress=progress, choose=choose, shaping=shaping
        )
        try:
            yield attempts
        finally:
            await attempts.close()


def makes_rollouts(config: RunConfig) -> bool:
    """Whether a run attempts tasks. One that reads rollouts from disk attempts held-out tasks only."""
    return config.tasks.source != "recorded" or config.tasks.heldout is not None


def check_method(config: RunConfig, *, remote: bool) -> None:
    """Raise an error if the training method cannot work in this run, and warn about a learning rate that rarely does.

    `remote`: the policy is trained on another machine.
    """
    method, lr = config.trainer.method, config.trainer.lr
    if method == "full":
        _check_takes_all_weights(config, remote=remote)
        if lr > _HIGH_LR:
            logger.warning("`trainer.lr` is %g: above %g full training usually diverges", lr, _HIGH_LR)
        return
    if method == "qlora" and not remote:
        from dockyard.engine.weights import check_installed  # imports torch, which a remote policy does not need here

        check_installed()
    if 0 < lr < _LOW_LR:
        logger.warning("`trainer.lr` is %g: below %g a LoRA barely moves", lr, _LOW_LR)
    if method == "qlora" and makes_rollouts(config) and config.engine.type != "transformers":
        logger.warning(
            "the trainer's base weights have 4 bits, those of `engine.type` `%s` do not: `train/mismatch_kl` reports "
            "each step how far apart they are; `--engine.type transformers` samples from the trainer's own weights",
            config.engine.type,
        )


def _check_takes_all_weights(config: RunConfig, *, remote: bool) -> None:
    """Servers take adapters only."""
    if remote:
        raise UsageError(
            "`trainer.method` is `full`, and a policy on another machine sends adapters only",
            hint="`--env modal` runs all of it there; `--trainer.method lora` trains an adapter",
        )
    if makes_rollouts(config) and config.engine.is_server:
        raise UsageError(
            f"`trainer.method` is `full`, but `engine.type` `{config.engine.type}` takes adapters only",
            hint="`--engine.type transformers` takes all weights; `--trainer.method lora` trains an adapter",
        )
