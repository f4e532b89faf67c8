"""The same through containers: agents of other dialects, and what a stop in the middle leaves behind."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import agent_stories
import pytest
import pytest_asyncio
from docker_engine import AGENTS_IMAGE, BASE, docker, need_image, use_engine
from processes import alive, descendants
from scripted_policy import Say, ScriptedEngine, lines, turn
from trials import write_task
from verifiers_server import PATIENCE_S, Served, assert_as_drawn, env_config, eventually, run_folder, served, task_data
from vllm_generate_fake import generate_fake

from dockyard.rollout.docker.site import OWNER_LABEL

pytestmark = [
    pytest.mark.docker,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),
]

WANTED = agent_stories.STORY_END.strip()
GRADE = f'[ "$(cat /app/hello.txt)" = "{WANTED}" ] && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n'
STALL = turn('{"analysis": "a", "plan": "p", "commands": [{"keystrokes": "sleep 600\\n", "duration": 60}]}')


def settings(agent: str) -> dict[str, Any]:
    network = {"network": "gateway"} if agent != "terminus-2" else {}
    return {
        "agent": {"name": agent, "install": "never" if agent != "terminus-2" else "auto"},
        "environment": {"type": "docker", **network},
        "engine": {"type": "vllm", "url": "http://localhost:8000", "retry_s": 0},
    }


@pytest.fixture(autouse=True, scope="module")
def engine() -> None:
    use_engine()
    need_image(AGENTS_IMAGE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(engine: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Served]:
    run = run_folder(tmp_path_factory.mktemp("runs") / "run", settings("terminus-2"))
    async with served(env_config({"run_dir": run}, {"run_dir": run})) as up:
        yield up


def make_task(folder: Path, *, image: str = AGENTS_IMAGE, dockerfile: str = "") -> dict[str, Any]:
    where = "" if dockerfile else f'docker_image = "{image}"\n'
    toml = f'[environment]\n{where}workdir = "/app"\n'
    task = write_task(folder / "task", GRADE, dockerfile, toml=toml)
    (task.path / "environment").mkdir(exist_ok=True)
    return task_data(task.path)


def containers(owner: int) -> list[str]:
    """Of this process or those that it started."""
    pids = {str(owner), *(str(process.pid) for process in descendants(owner))}
    line = f'{{{{.ID}}}} {{{{.Label "{OWNER_LABEL}"}}}}'
    rows = docker("ps", "--all", "--filter", f"label={OWNER_LABEL}", "--format", line).splitlines()
    return [row.split()[0] for row in rows if row.split("|")[3] in pids]


async def test_terminus_2_in_a_container_is_one_branch(server: Served, tmp_path: Path):
    policy = ScriptedEngine(lines(*agent_stories.terminus_2()))
    async with generate_fake(policy) as vllm:
        trace = await server.trace(vllm.url, make_task(tmp_path))
    assert (trace.ok, trace.reward, trace.num_turns, len(trace.branches)) == (True, 1.0, 8, 1)
    assert_as_drawn(trace, policy.drawn)
    assert containers(server.process.pid or 0) == []


async def test_an_agent_that_speaks_another_dialect_is_one_branch(tmp_path: Path):
    story: list[Say] = agent_stories.claude_code(Path("/app"))
    policy = ScriptedEngine(lines(*story))
    run = run_folder(tmp_path / "run", settings("claude-code"))
    async with generate_fake(policy) as vllm, served(env_config({"run_dir": run}, {"run_dir": run})) as server:
        trace = await server.trace(vllm.url, make_task(tmp_path))
    assert (trace.ok, trace.reward, trace.info["harbor_env"]["cause"]) == (True, 1.0, None)
    assert (trace.num_turns, len(trace.branches)) == (len(story), 1)
    assert_as_drawn(trace, policy.drawn)


async def test_an_image_that_cannot_be_built_makes_an_errored_trace(server: Served, tmp_path: Path):
    policy = ScriptedEngine(lines())
    async with generate_fake(policy) as vllm:
        trace = await server.trace(vllm.url, make_task(tmp_path, dockerfile=f"FROM {BASE}\nRUN false\n"))
    assert not trace.ok
    assert trace.rewards.get("harbor") is None
    assert (trace.info["harbor_env"]["cause"], policy.drawn) == ("environment_build", [])


async def test_a_cancelled_episode_leaves_no_container(server: Served, tmp_path: Path):
    async with generate_fake(ScriptedEngine(lambda _: STALL)) as vllm:
        episode = asyncio.create_task(server.trace(vllm.url, make_task(tmp_path)))
        async with asyncio.timeout(PATIENCE_S):
            await vllm.asked.wait()
        assert containers(server.process.pid or 0)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        await eventually(lambda: containers(server.process.pid or 0) == [])


async def test_a_server_that_is_told_to_end_leaves_no_container_and_no_process(tmp_path: Path):
    run = run_folder(tmp_path / "run", settings("terminus-2"))
    async with generate_fake(ScriptedEngine(lambda _: STALL)) as vllm:
        async with served(env_config({"run_dir": run}, {"run_dir": run})) as server:
            episode = asyncio.create_task(server.trace(vllm.url, make_task(tmp_path)))
            async with asyncio.timeout(PATIENCE_S):
                await vllm.asked.wait()
            started = descendants(server.process.pid or 0)
            left = containers(server.process.pid or 0)
            assert left
            server.process.terminate()
            await eventually(lambda: not server.process.is_alive() and not alive(started))
            episode.cancel()
            await asyncio.gather(episode, return_exceptions=True)
        await eventually(lambda: not set(left) & set(docker("ps", "--all", "--quiet").split()))
