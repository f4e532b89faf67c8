"""`load_environment`, the entry point of environments for verifiers before 0.4 and Prime-RL up to 0.8."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dockyard.config import AgentConfig, EngineConfig, EnvironmentConfig, ModelConfig, RolloutConfig, RunConfig
from dockyard.errors import DockyardError


def load_environment(
    tasks_dir: str | Path,
    environment_type: str = "docker",
    vllm_base_url: str = "http://localhost:8000/v1",
    model_name: str = "Qwen/Qwen3-8B",
    n_parallel_envs: int = 8,
    max_turns: int | None = None,
    *,
    agent: str = "terminus-2",
    trials_dir: str | Path = "outputs/trials",
) -> Any:
    """Return a legacy environment whose rollouts sample from the vLLM server at `vllm_base_url`."""
    if find_spec("verifiers.legacy") is None:
        raise DockyardError(
            f"verifiers {version('verifiers')} no longer supports `load_environment`",
            hint='name the taskset and the harness by their id: `taskset = {id = "harbor_env", tasks_dir = "..."}`',
        )
    from dockyard.backends.prime_rl.plugin.legacy_environment import LegacyHarborEnvironment

    config = RunConfig(
        model=ModelConfig(name=model_name),
        engine=EngineConfig(type="vllm", url=vllm_base_url),
        agent=AgentConfig(name=agent, max_turns=max_turns),
        environment=EnvironmentConfig(type=environment_type),
        rollout=RolloutConfig(concurrency=n_parallel_envs),
    )
    return LegacyHarborEnvironment(config, Path(tasks_dir).absolute(), Path(trials_dir).absolute())
