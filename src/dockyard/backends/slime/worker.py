"""Make a run's rollouts for SLiME: gateway, pool and trials, in an event loop on a thread of its own.

SLiME calls a hook and waits for it to return; rollouts that were started early continue in between. The engine is the
router in front of the SGLang servers to which SLiME gives new weights.
"""

import asyncio
import atexit
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dockyard.backends.launch import read_task_list
from dockyard.backends.slime.samples import adapter_name
from dockyard.collect.harbor_env_vars import hush
from dockyard.collect.open import open_pool
from dockyard.collect.run_plan import plan_of
from dockyard.config import RunConfig
from dockyard.engine.model_dir import find_model
from dockyard.engine.open import open_router
from dockyard.engine.remote_engine import ServedModel
from dockyard.errors import DockyardError, UsageError
from dockyard.gateway.render.renderer import Renderer
from dockyard.rollout.plan import Attempt, RolloutPlan, rollout_seed
from dockyard.rollout.pool import RolloutPool
from dockyard.run_dir.run import EVAL, ROLLOUTS, RunDir, RunPaths, eval_phase, step_phase
from dockyard.settings.load import load_run_config
from dockyard.tasks.order import due
from dockyard.types import Group, Rollout, Task

logger = logging.getLogger(__name__)

_CLOSE_S = 60.0


def run_folder(args: Any) -> Path:
    """Return the folder of the run that `--custom-config-path` names."""
    try:
        return Path(args.dockyard_run)
    except AttributeError:
        hint = "`dockyard backend slime RUN.toml` writes that file and SLiME's arguments"
        raise UsageError("SLiME was started without `--custom-config-path dockyard.yaml`", hint=hint) from None


def run_config(args: Any) -> RunConfig:
    """Return the settings of that run."""
    return load_run_config(RunPaths(run_folder(args)).config, [])


def check_agreement(args: Any, config: RunConfig) -> None:
    """Refuse manually changed arguments: rollouts would follow the run's settings, and SLiME the arguments."""
    for option, given, setting, value in (
        ("--rollout-batch-size", args.rollout_batch_size, "grpo.tasks_per_step", config.grpo.tasks_per_step),
        ("--n-samples-per-prompt", args.n_samples_per_prompt, "grpo.group_size", config.grpo.group_size),
        ("--rollout-temperature", args.rollout_temperature, "sampling.temperature", config.sampling.temperature),
    ):
        if given != value:
            hint = f"change `{setting}` in the run file, and start SLiME with `dockyard backend slime`"
            raise UsageError(f"SLiME was started with `{option} {given}`; the run's `{setting}` is {value}", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKey:
    """Identifies a worker. Calls with equal keys share it."""

    run: Path
    router_url: str
    model: str
    """The folder with its tokenizer."""
    context_length: int
    num_steps: int
    adapter: str | None = None
    """The LoRA adapter that the engines sample from."""

    @classmethod
    def of(cls, args: Any) -> Self:
        """Read the key from SLiME's arguments. Its router must be running."""
        if args.rollout_max_context_len is None:
            hint = "set `--engine.context_length N`, the tokens of prompt and answer together"
            raise UsageError("SLiME was started without `--rollout-max-context-len`", hint=hint)
        return cls(
            run=run_folder(args),
            router_url=f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
            model=args.hf_checkpoint,
            context_length=args.rollout_max_context_len,
            num_steps=args.num_rollout,
            adapter=adapter_name(args),
        )


class RolloutWorker:
    """Makes rollouts on its own thread, from construction until `close`."""

    def __init__(self, key: WorkerKey) -> None:
        hush()
        self._key = key
        self.run = RunDir.join(key.run)
        self.config = self.run.config
        self._model_dir = find_model(key.model, weights=False)
        self.renderer = Renderer.load(self._model_dir, self.config.model.name)
        self._tasks = read_task_list(key.run)
        self._started: dict[int, asyncio.Task[tuple[Group, ...]]] = {}
        self._working: set[asyncio.Task[Any]] = set()
        self._is_training = False
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        self._opened: Future[RolloutPool] = Future()
        # A daemon: a process that exits without `close` must not wait for unfinished rollouts.
        self._thread = threading.Thread(target=self._work, name="dockyard-rollouts", daemon=True)
        self._thread.start()
        self._pool = self._opened.result()
        atexit.register(self.close)

    def collect(self, step: int, *, ahead: int = 0) -> tuple[Group, ...]:
        """Return the groups of a step. The rollouts of the next `ahead` steps are started as well."""
        return self._submit(self._collect(step, ahead)).result()

    def evaluate(self, rollout_id: int) -> tuple[Group, ...]:
        """Attempt the held-out tasks. SLiME gives the evaluations before and after the first step the same number."""
        num_updates = rollout_id + 1 if self._is_training else rollout_id
        return self._submit(self._pool.collect(self._eval_plan(num_updates), _show_nothing)).result()

    async def attempt(self, task: str, group: int, index: int, *, evaluation: bool) -> Rollout:
        """Make one rollout, from any event loop. Cancelling this cancels the rollout."""
        return await asyncio.wrap_future(self._submit(self._attempt(task, group, index, evaluation)))

    def close(self) -> None:
        """Cancel running rollouts and wait until their environments are removed."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # the caller that waits for the start gets it there
            if self._opened.done():
                logger.exception("rollouts for SLiME ended")
            else:
                self._opened.set_exception(error)
        finally:  # not by `asyncio.run`: at exit no thread can be started any more
            self._loop.close()

    async def _serve(self) -> None:
        key = self._key
        model = ServedModel(name=key.model, context_length=key.context_length)
        async with (
            open_router(key.router_url, model, self._model_dir, adapter=key.adapter) as engine,
            open_pool(self.config, self.run, engine, self.renderer) as pool,
        ):
            self._opened.set_result(pool)
            await self._stop.wait()
            for task in self._working:
                task.cancel()
            await asyncio.gather(*self._working, return_exceptions=True)

    def _submit[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        async def working() -> T:
            return await self._start(work)

        return asyncio.run_coroutine_threadsafe(working(), self._loop)

    def _start[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return task

    async def _collect(self, step: int, ahead: int) -> tuple[Group, ...]:
        self._is_training = True
        for early in [step, *range(step + 1, min(step + ahead + 1, self._key.num_steps))]:
            if early not in self._started:
                self._started[early] = self._start(self._pool.collect(self._plan(early), _show_nothing))
        return await self._started.pop(step)

    async def _attempt(self, task: str, group: int, index: int, evaluation: bool) -> Rollout:
        self._is_training = self._is_training or not evaluation
        sampling, phase = self.config.sampling, EVAL if evaluation else ROLLOUTS
        attempt = Attempt(
            name=f"{phase}-{group:03}-{index:02}",
            task=self._task_named(task),
            group=group,
            index=index,
            seed=rollout_seed(self.config.seed, phase, group, index),
            temperature=sampling.eval_temperature if evaluation else sampling.temperature,
        )
        rollout = await self._pool.make(attempt)
        transcript = self.renderer.transcript(rollout)
        await asyncio.to_thread(self.run.write_rollout, phase, rollout, group=group, transcript=transcript)
        return rollout

    def _plan(self, step: int) -> RolloutPlan:
        config = self.config
        tasks = due(
            self._tasks.train,
            step,
            config.grpo.tasks_per_step,
            config.seed,
            kind_of=lambda task: task.kind,
            by_pass=config.counts_passes,
        )
        return plan_of(config, step_phase(step), tasks, config.grpo.group_size, retry_lost=False)

    def _eval_plan(self, num_updates: int) -> RolloutPlan:
        if not self._tasks.heldout:
            hint = "set `--tasks.heldout DIR`, or remove `--eval-interval`, without which SLiME does not evaluate"
            raise DockyardError("the run has no held-out tasks to evaluate", hint=hint)
        phase, temperature = eval_phase(num_updates), self.config.sampling.eval_temperature
        return plan_of(self.config, phase, self._tasks.heldout, self.config.eval.samples, temperature=temperature)

    def _task_named(self, name: str) -> Task:
        tasks = [*self._tasks.train, *self._tasks.heldout]
        found = next((task for task in tasks if task.name == name), None)
        if found is None:
            hint = "start SLiME with `--data-source-path dockyard.backends.slime.hooks.SlimeDataSource`"
            raise DockyardError(f"the run has no task `{name}`", hint=hint)
        return found


def _show_nothing(_: Rollout) -> None:
    """SLiME shows its own progress."""
