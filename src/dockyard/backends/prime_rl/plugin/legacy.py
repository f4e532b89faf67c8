"""An environment for verifiers before 0.4: each rollout is a Harbor trial whose tokens Dockyard's gateway records.

Rollouts use the weights that the server has. A trainer may replace them in place; adapters that are served under other
names are not used.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import verifiers.legacy as vf
from datasets import Dataset

from dockyard.backends.prime_rl.plugin.trials import Trials, attempt_of, run_to_the_end
from dockyard.collect.open import check_run, find_model_files, open_runner, open_source
from dockyard.config import RunConfig
from dockyard.rollout.trial import TrialRunner
from dockyard.tasks.folder import load_tasks
from dockyard.types import Rollout, Segment


class LegacyHarborEnvironment(vf.Environment):
    """What `load_environment` returns."""

    def __init__(self, config: RunConfig, tasks_dir: Path, trials_dir: Path) -> None:
        check_run(config)
        self._config = config
        self._model = find_model_files(config)
        self._tasks = load_tasks(tasks_dir)
        self._trials = Trials(self._open)
        self._trials_dir = trials_dir
        self._slots = asyncio.Semaphore(config.rollout.concurrency)
        rows = [
            {
                "example_id": number,
                "prompt": [{"role": "user", "content": task.name}],
                "info": {"harbor_task": task.name},
            }
            for number, task in enumerate(self._tasks)
        ]
        super().__init__(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[harbor_reward]))

    async def rollout(
        self,
        input: Any,  # noqa: A002 (verifiers' name for it)
        client: Any,
        model: str,
        sampling_args: dict[str, Any] | None = None,
    ) -> vf.State:
        """Run one trial. A failure that is not the policy's fault is recorded as an error and not trained on."""
        if model != self._config.model.name:
            raise ValueError(f"asked for `{model}`, but this environment samples from `{self._config.model.name}`")
        state = await self.init_state(input, client, model, sampling_args)
        state["timing"].generation.start = time.time()
        async with self._slots:
            rollout = await run_to_the_end(self._attempt(state["example_id"], (sampling_args or {}).get("temperature")))
        state["timing"].generation.end = time.time()
        state["harbor"] = {"reward": rollout.reward}
        state["trajectory"] = [step for segment in rollout.segments for step in _steps(segment, state["trajectory_id"])]
        state["completion"] = []
        state["is_completed"] = True
        state["stop_condition"] = rollout.failure.cause if rollout.failure else "done"
        if rollout.reward is None and rollout.failure:
            state["error"] = vf.InfraError(f"{rollout.failure.cause}: {rollout.failure.message}")
        return state

    async def _attempt(self, number: int, temperature: float | None) -> Rollout:
        trial = uuid4()
        temperature = self._config.sampling.temperature if temperature is None else temperature
        attempt = attempt_of(self._tasks[number], trial.hex, seed=trial.int % 2**32, temperature=temperature)
        async with self._trials.runner() as runner:
            return await runner.run(attempt)

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[TrialRunner]:
        config = self._config
        async with (
            open_source(config, self._model) as source,
            open_runner(config, source.engine, source.renderer, trials=self._trials_dir) as runner,
        ):
            yield runner


def harbor_reward(state: dict[str, Any]) -> float:
    """Return the reward of the task's verifier."""
    return state["harbor"]["reward"] or 0.0


def _steps(segment: Segment, trajectory_id: str) -> Iterator[dict[str, Any]]:
    """Yield the turns: each run of consecutive sampled tokens, with everything before it as the prompt."""
    assert segment.logprobs is not None
    edges = np.flatnonzero(np.diff(segment.sampled.astype(np.int8), prepend=0, append=0))
    for start, end in edges.reshape(-1, 2).tolist():
        tokens = {
            "prompt_ids": segment.token_ids[:start].tolist(),
            "prompt_mask": [0] * start,
            "completion_ids": segment.token_ids[start:end].tolist(),
            "completion_mask": [1] * (end - start),
            "completion_logprobs": segment.logprobs[start:end].tolist(),
            "overlong_prompt": False,
            "is_truncated": False,
            "routed_experts": None,
        }
        yield {
            "prompt": [],
            "completion": [],
            "response": None,
            "tokens": tokens,
            "reward": None,
            "advantage": None,
            "is_truncated": False,
            "trajectory_id": trajectory_id,
            "extras": {},
        }
