"""terminus-2 runs in the process that drives Harbor, so its run is a whole trial: sandbox, agent, verifier."""

from pathlib import Path

from dockyard.config import AgentConfig, EnvironmentConfig, RolloutConfig
from dockyard.gateway.app import Gateway
from dockyard.rollout.trial import Attempt, TrialRunner
from dockyard.types import Rollout, Task


async def attempt(gateway: Gateway, folder: Path, wanted: str, **kwargs: object) -> Rollout:
    """A rollout with reward 1 if `hello.txt` says `wanted` in the end. `kwargs` are the agent's."""
    runner = TrialRunner(
        gateway=gateway,
        agent=AgentConfig(name="terminus-2", max_turns=12, kwargs=kwargs),
        environment=EnvironmentConfig(type="sandbox"),
        limits=RolloutConfig(agent_timeout_s=120),
        max_new_tokens=4096,
        trials_dir=folder / "trials",
    )
    task = _write_task(folder / "task", wanted.strip())
    return await runner.run(Attempt(name="a", task=task, group=0, index=0, seed=0, temperature=1.0))


def _write_task(folder: Path, wanted: str) -> Task:
    grade = f'[ "$(cat hello.txt)" = "{wanted}" ] && reward=1 || reward=0'
    for name, text in {
        "task.toml": 'schema_version = "1.4"\n[task]\nname = "test/task"\n',
        "instruction.md": "Write a greeting into hello.txt.\n",
        "environment/Dockerfile": "FROM scratch\n",
        "tests/test.sh": f"{grade}\necho $reward > /logs/verifier/reward.txt\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Task(name=folder.name, path=folder, kind="")
