"""Harbor's agents end to end in real containers that reach nothing but the gateway, with a scripted policy behind it.

What is seen here is what `validated.json` may say: `DOCKYARD_WRITE_VALIDATED=1` writes it, any other run compares.
"""

import importlib.metadata
import json
import os
from dataclasses import dataclass
from pathlib import Path

import agent_stories
import pytest
from docker_engine import AGENTS_IMAGE, need_image
from scripted_policy import Say, ScriptedEngine, assert_one_segment, call, lines, odd_call, turn
from trials import attempt_at, trial_runner, write_task

from dockyard.config import AgentConfig, EnvironmentConfig, RolloutConfig
from dockyard.rollout.agents.wiring import VALIDATED
from dockyard.types import Blame, Rollout

pytestmark = [
    pytest.mark.filterwarnings("default", "ignore:.*checksum.*:DeprecationWarning"),  # litellm has many
]

WORK = Path("/app")
WANTED = agent_stories.STORY_END.strip()
LIMITS = RolloutConfig(agent_timeout_s=1200, setup_timeout_s=600)  # only against hanging


def aider() -> list[Say]:
    """One reply is all that a message gets."""
    return [turn(f"Here:\n\nhello.txt\n```\n{WANTED}\n```", thought="Hm.")]


def openhands() -> list[Say]:
    return [
        turn("I write it.", odd_call("execute_bash", command="echo café > hello.txt"), thought=" What is asked?\n"),
        turn(
            "",
            call("execute_bash", command="cat hello.txt"),
            odd_call("execute_bash", command="pwd"),
            thought="Is it there?",
        ),
        turn("  Two spaces.  ", call("execute_bash", command="sed -i 's/^/thé ou /' hello.txt")),
        Say("<think>\n\n</think>\n\n" + call("execute_bash", command="printf '%s\\n' \"<|im_end|>\" é")),
        turn(
            "",
            odd_call(
                "str_replace_editor", command="str_replace", path="/app/hello.txt", old_str="café", new_str="café?"
            ),
        ),
        turn("Done.", call("finish", message="It is done.")),
    ]


STORIES: dict[str, list[Say]] = {
    "oracle": [],
    "terminus-2": agent_stories.terminus_2(),
    "mini-swe-agent": agent_stories.mini_swe_agent(WORK),
    "qwen-coder": agent_stories.qwen_code(WORK),
    "claude-code": agent_stories.claude_code(WORK),
    "codex": agent_stories.codex(WORK),
    "aider": aider(),
    "openhands": openhands(),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """How a rollout went."""

    rollout: Rollout
    engine: ScriptedEngine
    version: str


async def roll_out(name: str, folder: Path, story: list[Say], *, image: str = AGENTS_IMAGE) -> Seen:
    """`install` is "never": a program that the image lacks is an error, and no installer is tried."""
    need_image(image)
    engine = ScriptedEngine(lines(*story))
    task = write_task(
        folder / "task",
        f'[ "$(cat /app/hello.txt)" = "{WANTED}" ] && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n',
        "",
        toml=f'[environment]\ndocker_image = "{image}"\nworkdir = "/app"\n',
        **{
            "instruction.md": f"Write the line `{WANTED}` into the file hello.txt.\n",
            "solution/solve.sh": f"echo '{WANTED}' > /app/hello.txt\n",
        },
    )
    (task.path / "environment").mkdir()  # the image is built already
    environment = EnvironmentConfig(type="docker", network="gateway")
    async with trial_runner(
        engine,
        folder,
        AgentConfig(name=name, install="never"),
        environment,
        limits=LIMITS,
        max_new_tokens=4096,
        renderer=agent_stories.renderer("qwen3"),
    ) as runner:
        rollout = await runner.run(attempt_at(task, name))
    result = json.loads((folder / "trials" / name / "result.json").read_text())
    return Seen(rollout, engine, result["agent_info"]["version"])


def compare_with_validated(name: str, version: str) -> None:
    """The file says what was seen, or is made to."""
    seen = {"version": version, "harbor": importlib.metadata.version("harbor")}
    validated = json.loads(VALIDATED.read_text())
    if os.environ.get("DOCKYARD_WRITE_VALIDATED"):
        validated = {agent: validated[agent] for agent in validated if agent in STORIES} | {name: seen}
        VALIDATED.write_text(json.dumps(dict(sorted(validated.items())), indent=2) + "\n")
        return
    assert validated.get(name) == seen, "`DOCKYARD_WRITE_VALIDATED=1` with this test writes what was seen"


@pytest.mark.parametrize("name", STORIES)
async def test_an_agent_earns_its_reward_and_every_token_is_trained_as_it_was_drawn(name: str, tmp_path: Path):
    story = STORIES[name]
    seen = await roll_out(name, tmp_path, story)
    rollout, stats = seen.rollout, seen.rollout.stats
    print(f"{name} {seen.version}: {stats['calls']} calls, {len(rollout.segments)} segments, {rollout.seconds}")
    assert (rollout.reward, rollout.failure) == (1.0, None)
    assert stats["calls"] == len(story)
    assert rollout.num_sampled == stats["sampled_tokens"]
    assert rollout.untrusted == ()
    if story:
        assert_one_segment(seen.engine, rollout.segments)
    compare_with_validated(name, seen.version)


async def test_nop_gets_nothing(tmp_path: Path):
    seen = await roll_out("nop", tmp_path, [])
    assert (seen.rollout.reward, seen.rollout.failure, seen.rollout.stats["calls"]) == (0.0, None, 0)


async def test_an_image_without_the_program_is_not_the_policys_fault(tmp_path: Path):
    seen = await roll_out("qwen-coder", tmp_path, [], image="dockyard/base:1")
    failure = seen.rollout.failure
    assert failure is not None
    assert (seen.rollout.reward, failure.cause, failure.blame) == (None, "agent_missing", Blame.INFRASTRUCTURE)
    assert "`qwen` is not in the image `dockyard/base:1`" in failure.message


def test_nothing_is_called_validated_that_is_not_tested_here():
    assert set(json.loads(VALIDATED.read_text())) == set(STORIES)
