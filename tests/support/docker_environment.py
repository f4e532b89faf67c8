"""`docker` environments and whole trials in them, for tests."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from docker_engine import BASE, docker
from harbor import Trial, TrialAgentConfig, TrialConfig, TrialEnvironmentConfig, TrialResult, TrialTaskConfig
from harbor import TrialVerifierConfig as VerifierConfig
from harbor.models.task.config import EnvironmentConfig as TaskEnvironment
from harbor.models.trial.paths import TrialPaths

from dockyard.rollout.docker.environment import DockerEnvironment
from dockyard.rollout.docker.site import RUN_LABEL
from dockyard.rollout.environments import Site
from dockyard.rollout.verifier import VERIFIER

NAME = f"dockyard-environment-test-{os.getpid()}"  # tests run in several processes
SOLVE = "echo 42 >/answer.txt"
GRADE = 'grep -qx 42 /answer.txt && r=1 || r=0\necho "$r" >/logs/verifier/reward.txt'
COMPOSE = f"""
services:
  main:
    command: [sh, -c, "sleep 0.1; touch /up; sleep infinity"]
    healthcheck: {{test: [CMD, test, -e, /up], interval: 1s, retries: 20}}
  other:
    image: {BASE}
    command: [sleep, infinity]
    stop_grace_period: 0s
"""


def make(folder: Path, *, files: dict[str, str] | None = None, **kwargs: Any) -> DockerEnvironment:
    """An environment that is not started. Without a Dockerfile it is the base image."""
    files = files or {}
    (folder / "environment").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / "environment" / name).write_text(text)
    image = {} if files else {"docker_image": BASE}
    return DockerEnvironment(
        environment_dir=folder / "environment",
        environment_name=NAME,
        session_id="tiny__env",
        trial_paths=TrialPaths(trial_dir=folder / "trial"),
        task_env_config=TaskEnvironment(**image, **kwargs.pop("task", {})),
        **kwargs,
    )


@asynccontextmanager
async def started(folder: Path, **kwargs: Any) -> AsyncGenerator[DockerEnvironment]:
    environment = make(folder, **kwargs)
    try:
        await environment.start(force_build=False)
        yield environment
    finally:
        await environment.stop(delete=True)


def containers_of(run: str) -> list[str]:
    return docker("ps", "--all", "--quiet", "--filter", f"label={RUN_LABEL}={run}").split()


async def main_of(environment: DockerEnvironment) -> str:
    return (await environment.exec("hostname")).stdout.strip()  # pyright: ignore[reportOptionalMemberAccess]


async def code_of(environment: DockerEnvironment, command: str) -> int:
    return (await environment.exec(command)).return_code


def docker_clients() -> list[str]:
    """Those that this process started and that are still there."""
    found: list[str] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue
        if rest.split()[1] == str(os.getpid()) and name.startswith("docker"):
            found.append(stat.parent.name)
    return found


def write_task(folder: Path, *, solve: str = SOLVE, test: str = GRADE, toml: str = "") -> Path:
    image = f'docker_image = "{BASE}"'
    toml = toml.replace("[environment]", f"[environment]\n{image}") if "[environment]" in toml else toml
    toml = toml if image in toml else f"{toml}\n[environment]\n{image}"
    for name, text in {
        "task.toml": f'schema_version = "1.4"\n{toml}\n[task]\nname = "tests/tiny"\n',
        "instruction.md": "Write 42 into /answer.txt.\n",
        "solution/solve.sh": f"#!/bin/bash\n{solve}\n",
        "tests/test.sh": f"#!/bin/bash\n{test}\n",
    }.items():
        path = folder / "tiny" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "tiny" / "environment").mkdir(exist_ok=True)
    return folder / "tiny"


async def run_trial(
    folder: Path, site: Site | TrialEnvironmentConfig, *, timeout_s: float | None = None, **task: str
) -> TrialResult:
    config = TrialConfig(
        task=TrialTaskConfig(path=write_task(folder, **task)),
        trial_name="step-00000-000-00",
        trials_dir=folder / "trials",
        agent=TrialAgentConfig(name="oracle"),
        environment=site.environment if isinstance(site, Site) else site,
        verifier=VerifierConfig(import_path=VERIFIER, kwargs={"timeout_s": timeout_s}),
    )
    return await (await Trial.create(config)).run()


def reward_of(result: TrialResult) -> float:
    assert result.exception_info is None, result.exception_info.exception_message
    assert result.verifier_result is not None
    assert result.verifier_result.rewards is not None
    return result.verifier_result.rewards["reward"]
