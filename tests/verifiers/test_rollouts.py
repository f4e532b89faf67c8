"""Real trials in sandboxes through verifiers' env server, whose workers are processes of their own."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import compacting_agent
import pytest
import pytest_asyncio
from agent_stories import STORY_END, terminus_2
from processes import alive, descendants
from scripted_policy import Line, ScriptedEngine, lines, turn
from trials import write_task
from verifiers_server import PATIENCE_S, Served, assert_as_drawn, env_config, eventually, run_folder, served, task_data
from vllm_generate_fake import generate_fake

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # verifiers and what it brings have many
]

GRADE = "[ -e /app/done ] && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n"
SOLVE = turn("```bash\ntouch /app/done\n```", thought="Let me see.")
STALL = turn("```bash\nsleep 600\n```")
END = turn("All done.", thought="That is all.")


def solve_then_end(prompt: str) -> Line:
    """Whoever asks, in whatever order."""
    return END if "exit code" in prompt else SOLVE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Served]:
    settings = {
        "agent": {"name": compacting_agent.NAME},
        "engine": {"type": "vllm", "url": "http://localhost:8000", "retry_s": 0},
    }
    folder = tmp_path_factory.mktemp("runs")
    run, data = run_folder(folder / "run", settings), make_task(folder)
    async with served(env_config({"run_dir": run}, {"run_dir": run}), workers=2) as up:
        async with generate_fake(ScriptedEngine(solve_then_end)) as vllm:
            # Workers load their tokenizers in their first episode, which would be time of a test's agent.
            await asyncio.gather(*(up.trace(vllm.url, data) for _ in range(2)))
        yield up


def make_task(folder: Path, test: str = GRADE, dockerfile: str = "FROM scratch\n", *, toml: str = "") -> dict[str, Any]:
    return task_data(write_task(folder / "task", test, dockerfile, toml=toml).path)


async def test_a_history_that_grows_is_one_branch_though_the_agent_drops_thoughts(server: Served, tmp_path: Path):
    engine = ScriptedEngine(lines(SOLVE, turn("```bash\nls  é\n```", thought="\n Odd. \n"), END))
    async with generate_fake(engine) as vllm:
        trace = await server.trace(vllm.url, make_task(tmp_path))
    assert (trace.ok, trace.reward, trace.num_turns, len(trace.branches)) == (True, 1.0, 3, 1)
    assert trace.info["harbor_env"]["cause"] is None
    assert_as_drawn(trace, engine.drawn)


async def test_a_rewritten_history_is_a_branch_of_its_own(server: Served, tmp_path: Path):
    compact = turn("```bash\ntrue # compact\n```", thought="Too long.")
    engine = ScriptedEngine(lines(SOLVE, compact, turn("```bash\ntrue\n```"), END))
    async with generate_fake(engine) as vllm:
        trace = await server.trace(vllm.url, make_task(tmp_path))
    assert (trace.ok, trace.reward, trace.num_turns, len(trace.branches)) == (True, 1.0, 4, 2)
    assert_as_drawn(trace, engine.drawn)


async def test_eight_episodes_at_once_each_keep_their_own_tokens(server: Served, tmp_path: Path):
    engine = ScriptedEngine(solve_then_end)
    data = make_task(tmp_path)
    async with generate_fake(engine) as vllm:
        traces = await asyncio.gather(*(server.trace(vllm.url, data) for _ in range(8)))
    assert [(trace.ok, trace.reward, len(trace.branches)) for trace in traces] == [(True, 1.0, 1)] * 8
    assert len({trace.id for trace in traces}) == 8
    logprobs = [logprob for trace in traces for node in trace.nodes for logprob in node.logprobs]
    drawn = [float(logprob) for one in engine.drawn for logprob in one.generation.logprobs]
    assert sorted(logprobs) == sorted(drawn)


async def test_an_engine_that_fails_makes_an_errored_trace_and_never_a_reward(server: Served, tmp_path: Path):
    engine = ScriptedEngine(lines(SOLVE, *[RuntimeError("out of memory")] * 50))
    async with generate_fake(engine) as vllm:
        trace = await server.trace(vllm.url, make_task(tmp_path))
    assert not trace.ok
    assert trace.errors
    assert trace.rewards.get("harbor") is None
    assert trace.info["harbor_env"]["cause"] == "engine_failed"


async def test_an_environment_that_cannot_be_built_makes_an_errored_trace(server: Served, tmp_path: Path):
    engine = ScriptedEngine(solve_then_end)
    async with generate_fake(engine) as vllm:
        trace = await server.trace(vllm.url, make_task(tmp_path, dockerfile="FROM scratch\nRUN false\n"))
    assert not trace.ok
    assert "environment_build" in str(trace.errors)
    assert trace.rewards.get("harbor") is None
    assert engine.drawn == []


async def test_a_policy_that_runs_out_of_time_keeps_its_reward_or_gets_0(server: Served, tmp_path: Path):
    """The first task's own limit, and verifiers' limit, before which ours must come."""
    engine = ScriptedEngine(lambda prompt: STALL if "exit code" in prompt else SOLVE)
    slow = make_task(tmp_path / "slow", toml="[agent]\ntimeout_sec = 40.0\n")
    cut = make_task(tmp_path / "cut") | {"timeout": {"agent": 60.0}}
    async with generate_fake(engine) as vllm:
        kept, lost = await asyncio.gather(server.trace(vllm.url, slow), server.trace(vllm.url, cut))
    assert (kept.ok, kept.reward, kept.info["harbor_env"]["cause"]) == (True, 1.0, "agent_timeout")
    assert (lost.ok, lost.reward, lost.info["harbor_env"]["cause"]) == (True, 0.0, "rollout_timeout")


async def test_a_policy_that_fills_its_context_keeps_its_reward(server: Served, tmp_path: Path):
    long = turn("```bash\ntouch /app/done; seq 1 3000\n```")
    engine = ScriptedEngine(lines(long))
    async with generate_fake(engine, max_model_len=500) as vllm:
        trace = await server.trace(vllm.url, make_task(tmp_path))
    assert (trace.ok, trace.reward, trace.info["harbor_env"]["cause"]) == (True, 1.0, "context_overflow")
    assert_as_drawn(trace, engine.drawn)


async def test_a_cancelled_episode_leaves_no_process_and_the_server_goes_on(server: Served, tmp_path: Path):
    before = descendants(server.process.pid or 0)
    engine = ScriptedEngine(lambda prompt: STALL)
    data = make_task(tmp_path)
    async with generate_fake(engine) as vllm:
        episode = asyncio.create_task(server.trace(vllm.url, data))
        async with asyncio.timeout(PATIENCE_S):
            await vllm.asked.wait()
        started = descendants(server.process.pid or 0) - before
        assert started, "its sandbox is a process"
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        await eventually(lambda: not alive(started))
    async with generate_fake(ScriptedEngine(solve_then_end)) as vllm:
        assert (await server.trace(vllm.url, data)).reward == 1.0


async def test_a_limit_of_verifiers_own_ends_the_agent_which_keeps_its_reward(tmp_path: Path):
    """The agent and its place are fields here, no run's settings."""
    engine = ScriptedEngine(lambda prompt: turn("```bash\ntrue\n```") if "exit code" in prompt else SOLVE)
    fields = {"agent": "shell", "environment_type": "sandbox", "trials_dir": str(tmp_path / "trials")}
    data = make_task(tmp_path)
    async with generate_fake(engine) as vllm, served(env_config({"tasks_dir": "."}, fields, max_turns=2)) as server:
        trace = await server.trace(vllm.url, data)
    assert (trace.ok, trace.reward, trace.stop_condition, trace.num_turns) == (True, 1.0, "max_turns", 2)
    assert_as_drawn(trace, engine.drawn)
    assert [path.name for path in (tmp_path / "trials").iterdir()] == [f"task-{trace.id[:16]}"]


async def test_terminus_2_in_a_sandbox_is_one_branch_though_it_drops_thoughts(tmp_path: Path):
    grade = f'[ "$(cat hello.txt)" = "{STORY_END.strip()}" ] && reward=1 || reward=0\n'
    data = make_task(tmp_path, f"{grade}echo $reward > /logs/verifier/reward.txt\n")
    engine = ScriptedEngine(lines(*terminus_2()))
    fields = {"environment_type": "sandbox", "trials_dir": str(tmp_path / "trials")}
    async with generate_fake(engine) as vllm, served(env_config({"tasks_dir": "."}, fields)) as server:
        trace = await server.trace(vllm.url, data)
    assert (trace.ok, trace.reward, trace.num_turns, len(trace.branches)) == (True, 1.0, 8, 1)
    assert_as_drawn(trace, engine.drawn)
