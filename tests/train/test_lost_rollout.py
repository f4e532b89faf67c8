"""A sandbox dies under one rollout of a real group: the others are trained as if it had never been."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gateway_fakes import tiny_renderer
from tiny_policy import tiny_policy
from trials import attempt_at, trial_runner, write_task

from dockyard.config import AgentConfig, EngineConfig
from dockyard.engine.embedded.engine import TransformersEngine
from dockyard.trainer.policy import Policy
from dockyard.types import Blame, Group

# A random model solves nothing, so the reward is the length of what it said, modulo 7.
TEST_SH = 'echo "$(( $(wc -c < /app/reply.txt) % 7 ))" > /logs/verifier/reward.txt\n'

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")


async def real_group(policy: Policy, folder: Path) -> Group:
    engine = TransformersEngine(policy.serving_model(), EngineConfig(deterministic=True))
    task = write_task(folder / "task", TEST_SH)
    agent = AgentConfig(name="mortal_agent:MortalAgent")
    async with trial_runner(engine, folder, agent, max_new_tokens=24, renderer=tiny_renderer()) as runner:
        names = ("a", "b", "c-mortal", "d")
        attempts = [replace(attempt_at(task, name, index=index), seed=index) for index, name in enumerate(names)]
        rollouts = [await runner.run(attempt) for attempt in attempts]
    await engine.close()
    return Group(task="task", rollouts=tuple(rollouts))


def trained(policy: Policy, group: Group) -> torch.Tensor:
    policy.update([group], num_steps=1)
    return torch.cat([p.detach().flatten() for p in policy.model.parameters() if p.requires_grad])


async def test_a_group_in_which_one_sandbox_died_gives_the_gradient_of_the_group_without_that_rollout(tmp_path: Path):
    group = await real_group(tiny_policy(), tmp_path)
    dead = group.rollouts[2]
    assert dead.failure is not None
    assert (dead.reward, dead.failure.cause, dead.failure.blame) == (None, "environment_died", Blame.INFRASTRUCTURE)
    rest = replace(group, rollouts=tuple(rollout for rollout in group.rollouts if rollout is not dead))
    assert len({rollout.reward for rollout in rest.rollouts}) > 1, "without a difference there is no gradient"
    with_it, without_it = trained(tiny_policy(), group), trained(tiny_policy(), rest)
    assert torch.equal(with_it, without_it)
    assert not torch.equal(with_it, trained(tiny_policy(lr=0.0), rest))


async def test_a_group_that_lost_all_but_one_is_not_trained_on(tmp_path: Path):
    group = await real_group(tiny_policy(), tmp_path)
    alone = replace(group, rollouts=(group.rollouts[0], *(replace(r, reward=None) for r in group.rollouts[1:])))
    policy = tiny_policy(kl_coef=0.1)
    metrics = policy.update([alone], num_steps=1)
    assert metrics["train/tokens"] == 0
