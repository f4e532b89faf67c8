"""The `shell` agent through a real Harbor trial in a real sandbox, with a scripted engine."""

import json
import re
from pathlib import Path

import pytest
from gateway_fakes import FakeEngine, Said, tiny_renderer
from trials import make_rollout, skip_without_terminals

from dockyard.config import AgentConfig, RolloutConfig
from dockyard.engine.protocol import ContextOverflow
from dockyard.types import Blame, Finish, Rollout

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum.*:DeprecationWarning")


class Masked:
    """Equals what Harbor leaves of a secret: its ends."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and re.fullmatch(r".{4}\*+.{3}", other) is not None


HELLO = '[ "$(cat /app/hello.txt)" = hi ] && echo 0.5 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt'
WRITE = Said("```bash\necho hi > hello.txt\n```")


async def rollout_of(
    engine: FakeEngine,
    folder: Path,
    test: str = HELLO,
    dockerfile: str = "FROM scratch\n",
    *,
    max_turns: int = 3,
    limits: RolloutConfig | None = None,
    **kwargs: object,
) -> Rollout:
    agent = AgentConfig(name="shell", max_turns=max_turns, kwargs=kwargs)
    return await make_rollout(engine, folder, test, dockerfile, agent=agent, limits=limits)


async def test_a_command_in_a_fence_is_run_and_its_output_fed_back_in_one_segment(tmp_path: Path):
    engine = FakeEngine([WRITE, Said("```bash\ncat hello.txt; exit 3\n```"), Said("It is done.")])
    rollout = await rollout_of(engine, tmp_path)
    assert (rollout.reward, rollout.failure, rollout.attempt, rollout.kind) == (0.5, None, 1, "k")
    assert len(engine.requests) == 3
    [segment] = rollout.segments
    text = tiny_renderer().transcript(rollout)
    assert "<|im_start|>user\nexit code 3\nhi<|im_end|>" in text
    assert segment.sampled.sum() == sum(len(generation.token_ids) for generation in engine.generations)
    assert rollout.stats["splices"] == 2
    assert rollout.seconds["total"] > 0


async def test_the_agent_stops_after_its_last_turn(tmp_path: Path):
    engine = FakeEngine([WRITE, WRITE, WRITE])
    assert (await rollout_of(engine, tmp_path, max_turns=2)).reward == 0.5
    assert len(engine.requests) == 2


async def test_examples_are_shown_before_the_task(tmp_path: Path):
    engine = FakeEngine([WRITE])
    rollout = await rollout_of(engine, tmp_path, max_turns=1, system_prompt="Be brief.", examples=[["Ask.", "Reply."]])
    text = tiny_renderer().transcript(rollout)
    assert text.startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAsk.<|im_end|>\n"
        "<|im_start|>assistant\nReply.<|im_end|>\n<|im_start|>user\nDo it.<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_cut_reply_without_a_command_ends_the_rollout_with_its_reward(tmp_path: Path):
    rollout = await rollout_of(FakeEngine([Said("```bash\necho hi", finish=Finish.LENGTH)]), tmp_path)
    assert (rollout.reward, rollout.failure) == (0.0, None)


async def test_a_prompt_that_does_not_fit_is_the_policys_failure_and_keeps_the_reward(tmp_path: Path):
    overflow = ContextOverflow(prompt_tokens=9, context_length=8)
    rollout = await rollout_of(FakeEngine([WRITE, overflow]), tmp_path)
    assert rollout.failure is not None
    assert (rollout.reward, rollout.failure.cause, rollout.failure.blame) == (0.5, "context_overflow", Blame.POLICY)


async def test_a_failing_engine_is_not_the_policys_fault(tmp_path: Path):
    rollout = await rollout_of(FakeEngine([WRITE, RuntimeError("no memory")]), tmp_path)
    assert rollout.failure is not None
    assert (rollout.reward, rollout.failure.cause) == (None, "engine_failed")
    assert rollout.failure.blame is Blame.INFRASTRUCTURE


async def test_a_task_that_cannot_be_built_is_not_the_policys_fault(tmp_path: Path):
    rollout = await rollout_of(FakeEngine(), tmp_path, dockerfile="FROM debian\nRUN apt-get update\n")
    assert rollout.failure is not None
    assert (rollout.reward, rollout.failure.cause) == (None, "environment_build")
    assert "docker" in rollout.failure.message


async def test_a_verifier_without_a_reward_counts_as_zero(tmp_path: Path):
    rollout = await rollout_of(FakeEngine([WRITE]), tmp_path, test="true")
    assert rollout.failure is not None
    assert (rollout.reward, rollout.failure.cause, rollout.failure.blame) == (0.0, "reward_missing", Blame.POLICY)


async def test_an_agent_out_of_time_keeps_its_reward(tmp_path: Path):
    limits = RolloutConfig(agent_timeout_s=12)  # enough for what comes before it sleeps, also on a busy machine
    slow = Said("```bash\necho hi > hello.txt; sleep 60\n```")
    rollout = await rollout_of(FakeEngine([slow]), tmp_path, limits=limits)
    assert rollout.failure is not None
    assert (rollout.reward, rollout.failure.cause) == (0.5, "agent_timeout")


async def test_a_rollout_out_of_time_is_cut_and_counts_as_zero(tmp_path: Path):
    limits = RolloutConfig(total_timeout_s=12)  # its command must have begun by then
    rollout = await rollout_of(FakeEngine([Said("```bash\nsleep 60\n```")]), tmp_path, limits=limits)
    assert rollout.failure is not None
    assert (rollout.reward, rollout.failure.cause) == (0.0, "rollout_timeout")


async def test_the_key_of_a_rollout_is_not_in_its_files(tmp_path: Path):
    await rollout_of(FakeEngine([WRITE]), tmp_path)
    files = [path for path in (tmp_path / "trials").rglob("*") if path.is_file()]
    mentioned = [path for path in files if "DOCKYARD_API_KEY" in path.read_text(errors="replace")]
    assert mentioned
    for path in mentioned:
        assert re.findall(r'"DOCKYARD_API_KEY": "(.*?)"', path.read_text()) == [Masked()]


@pytest.mark.filterwarnings("default")  # of litellm's many parts
async def test_terminus_2_is_recorded_in_one_segment(tmp_path: Path):
    skip_without_terminals()

    def say(*keystrokes: str, done: bool) -> Said:
        commands = [{"keystrokes": text, "duration": 0.5} for text in keystrokes]
        return Said(json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": done}))

    engine = FakeEngine([say("echo hi > hello.txt\n", done=False), say(done=True), say(done=True)])
    rollout = await make_rollout(engine, tmp_path, HELLO, agent=AgentConfig(name="terminus-2", max_turns=5))
    assert (rollout.reward, rollout.failure) == (0.5, None)
    assert len(rollout.segments) == 1
    assert len(engine.requests) == 3


async def test_both_outputs_are_shown_in_the_order_they_were_written_even_of_a_command_that_is_no_shell(tmp_path: Path):
    mixed, broken = Said("```bash\necho 1; echo 2 >&2; echo 3\n```"), Said("```bash\necho 4\nif ; fi\n```")
    text = tiny_renderer().transcript(await rollout_of(FakeEngine([mixed, broken]), tmp_path))
    assert "exit code 0\n1\n2\n3<|im_end|>" in text
    assert "exit code 2\n4\n" in text
    assert "syntax error" in text
