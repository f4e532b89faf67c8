"""terminus-2 runs in the process that drives Harbor, so its run is a whole trial: sandbox, agent, verifier."""

from pathlib import Path

from trials import attempt_at, write_task

from dockyard.config import AgentConfig, EnvironmentConfig, RolloutConfig
from dockyard.gateway.server import Gateway
from dockyard.rollout.environments import sandbox_site
from dockyard.rollout.trial import Phases, TrialRunner
from dockyard.types import Rollout


async def attempt(gateway: Gateway, folder: Path, wanted: str, **kwargs: object) -> Rollout:
    """A rollout with reward 1 if `hello.txt` says `wanted` in the end. `kwargs` are the agent's."""
    limits = RolloutConfig(agent_timeout_s=1200)  # only against hanging
    runner = TrialRunner(
        gateway=gateway,
        agents_url=gateway.root_url,
        agent=AgentConfig(name="terminus-2", max_turns=12, kwargs=kwargs),
        site=sandbox_site(EnvironmentConfig()),
        limits=limits,
        phases=Phases(limits),
        max_new_tokens=4096,
        trials_dir=folder / "trials",
    )
    grade = f'[ "$(cat hello.txt)" = "{wanted.strip()}" ] && reward=1 || reward=0'
    test = f"{grade}\necho $reward > /logs/verifier/reward.txt\n"
    task = write_task(folder / "task", test)
    (task.path / "instruction.md").write_text("Write a greeting into hello.txt.\n")
    return await runner.run(attempt_at(task, index=0))
