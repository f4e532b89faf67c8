"""A real model drives the `shell` agent in both kinds of sandbox and in Docker: the same ids, outputs and rewards."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from docker_engine import BASE
from rows import environment_of
from trials import attempt_at, trial_runner

from dockyard.config import AgentConfig, EngineConfig, ModelConfig
from dockyard.engine.embedded.engine import TransformersEngine
from dockyard.engine.model_dir import find_model
from dockyard.engine.weights import load_model
from dockyard.gateway.render.renderer import Renderer
from dockyard.settings.load import load_run_config
from dockyard.tasks.folder import load_tasks
from dockyard.tasks.generated import DEMO_KINDS, write_demo_tasks
from dockyard.types import Rollout, Task

pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("default")]

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def demo_tasks(folder: Path) -> list[Task]:
    """One of each kind, on the image that is here."""
    write_demo_tasks(folder, num_train=6, num_heldout=6, seed=1)
    for dockerfile in folder.glob("*/*/environment/Dockerfile"):
        text = dockerfile.read_text()
        # The language that a sandbox speaks: programs quote in it when they complain.
        dockerfile.write_text(text.replace("FROM debian:bookworm-slim", f"FROM {BASE}\nENV LANG=C.UTF-8"))
    tasks = load_tasks(folder / "train")
    assert {task.kind for task in tasks} == set(DEMO_KINDS)
    return tasks


async def roll_out(kind: str, tasks: list[Task], folder: Path, agent: AgentConfig) -> list[Rollout]:
    model_dir = find_model("smollm2-135m")
    model = load_model(model_dir, ModelConfig(device="cpu", dtype="float32"))
    engine = TransformersEngine(model, EngineConfig(deterministic=True))
    renderer = Renderer.load(model_dir, "smollm2-135m")
    async with trial_runner(
        engine, folder, agent, environment_of(kind), max_new_tokens=48, renderer=renderer
    ) as runner:
        attempts = [replace(attempt_at(task, task.name), seed=seed, temperature=0.4) for seed, task in enumerate(tasks)]
        slots = asyncio.Semaphore(3)

        async def make(attempt):
            async with slots:
                return await runner.run(attempt)

        rollouts = await asyncio.gather(*map(make, attempts))
    await engine.close()
    return list(rollouts)


@pytest.mark.parametrize("kind", ["namespaces", "landlock"])
async def test_the_same_ids_give_the_same_results_in_a_sandbox_and_in_docker(tmp_path: Path, kind: str):
    demo = load_run_config(DEMO, [])
    renderer = Renderer.load(find_model("smollm2-135m"), "smollm2-135m")
    agent = demo.agent.model_copy(update={"max_turns": 2})  # so that a command's output is in the second prompt
    tasks = demo_tasks(tmp_path / "tasks")
    in_sandbox = await roll_out(kind, tasks, tmp_path / "sandbox", agent)
    in_docker = await roll_out("docker", tasks, tmp_path / "docker", agent)
    assert all(rollout.failure is None for rollout in [*in_sandbox, *in_docker])
    rewards = [rollout.reward for rollout in in_sandbox]
    assert rewards == [rollout.reward for rollout in in_docker]
    assert len(set(rewards)) > 1, "a model that solves all or nothing shows little"
    assert any(rollout.stats["calls"] == 2 for rollout in in_sandbox)
    for ours, theirs in zip(in_sandbox, in_docker, strict=True):
        [first], [second] = ours.segments, theirs.segments
        assert renderer.transcript(ours) == renderer.transcript(theirs)
        assert np.array_equal(first.token_ids, second.token_ids)
        assert np.array_equal(first.sampled, second.sampled)
        assert first.logprobs is not None
        assert second.logprobs is not None
        assert np.array_equal(first.logprobs, second.logprobs)
