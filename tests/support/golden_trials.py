"""Makes the trial folders in `tests/data/trials`: real agents in real containers, with the scripted policy behind them.

    sh tools/install-docker.sh && sh tools/build-agent-image.sh
    python tests/support/golden_trials.py [NAME ...]

What conversion reads is kept, and nothing that differs from machine to machine: paths, addresses, keys and the names of
containers become fixed words. No prompt is shortened; JSON of more than 100 kB loses its line breaks.
"""

import argparse
import asyncio
import json
import re
import runpy
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import agent_stories
from docker_engine import AGENTS_IMAGE, need_image, use_engine
from scripted_policy import Say, Script, ScriptedEngine, call, lines, turn, voices
from trials import attempt_at, trial_runner, write_task

from dockyard.config import AgentConfig, EnvironmentConfig, RolloutConfig
from dockyard.engine.protocol import ContextOverflow
from dockyard.types import Rollout

TRIALS = Path(__file__).parents[1] / "data" / "trials"
STORIES: dict[str, list[Say]] = runpy.run_path(str(Path(__file__).parents[1] / "docker" / "test_agents.py"))["STORIES"]
LONG = 100_000
WANTED = agent_stories.STORY_END.strip()
KEPT = (
    "config.json",
    "result.json",
    "trial.log",
    "agent/trajectory*.json",
    "agent/aider.chat.history.md",
    "agent/mini-swe-agent.trajectory.json",
    "agent/completions/*.json",
)
SCRUBBED = (
    (re.compile(r"http://[0-9.]+:[0-9]+"), "http://gateway:8000"),
    (re.compile(r"root@[0-9a-f]{12}"), "root@container"),
    (re.compile(r'("DOCKYARD_API_KEY": )"[^"]*"'), r'\1"****"'),
    (re.compile(r"dockyard-[0-9a-f]{8}\b"), "dockyard-run"),
    (re.compile(r'("run": )"[0-9a-f]{8}"'), r'\1"run"'),
)


@dataclass(frozen=True, slots=True)
class Golden:
    """One trial: an agent, how it is set up, and what the policy says to it."""

    agent: str
    script: Script
    kwargs: dict[str, Any] = field(default_factory=dict)


def typed(*keystrokes: str, done: bool = False) -> Say:
    """A turn of terminus-2's."""
    commands = [{"keystrokes": keys, "duration": 0.3} for keys in keystrokes]
    return turn(json.dumps({"analysis": "é", "plan": "p", "commands": commands, "task_complete": done}))


def summarised() -> Script:
    """The context is full after two turns; terminus-2 then asks for a summary, for questions and for answers."""
    before = [typed(f"echo '{WANTED}' > hello.txt\n"), typed("cat hello.txt\n")]
    full = ContextOverflow(prompt_tokens=99_999, context_length=20_000)
    summary = [turn("I wrote it.", thought="Hm."), turn("What is left?"), turn("Nothing.")]
    return lines(*before, full, *summary, typed("wc -c hello.txt\n"), typed(done=True), typed(done=True))


def with_subagent() -> Script:
    """claude-code hands a question to another; which runs in the background, so the first has to wait for it."""
    ask = call("Agent", description="count", prompt="COUNT the files of this folder", subagent_type="general-purpose")
    wait = call("Bash", command="for i in $(seq 200); do [ -s /tmp/listing ] && break; sleep 0.1; done; sleep 1")
    write = turn("I write it.", call("Write", content=f"{WANTED}\n", file_path="/app/hello.txt"), thought="So.")
    main = lines(write, turn("I ask.", ask), turn("I wait.", wait), turn("One file."), turn("As I said."))
    helper = lines(turn("", call("Bash", command="ls > /tmp/listing")), turn("There is one.", thought="Aha."))
    return voices(("COUNT the files", helper), main=main)


def shell() -> Script:
    commands = ["echo café > hello.txt", "sed -i -e 's/^/thé ou /' -e 's/$/?/' hello.txt", "cat hello.txt"]
    thoughts = ["What is asked?", "", ""]
    said = [
        turn(f"```bash\n{command}\n```", thought=thought) for command, thought in zip(commands, thoughts, strict=True)
    ]
    return lines(*said, turn("Done: thé.", thought="That is all."))


EXAMPLES = {"examples": [["Say hi.", "```bash\necho hi\n```"]]}
KEPT_SUMMARY = {"enable_summarize": True, "trajectory_config": {"raw_content": True}}
LINEAR = {"enable_summarize": True, "trajectory_config": {"raw_content": True, "linear_history": True}}
GOLDEN: dict[str, Golden] = {
    **{name: Golden(name, lines(*story)) for name, story in STORIES.items()},
    "shell": Golden("shell", shell(), EXAMPLES),
    "terminus-2-ids": Golden("terminus-2", lines(*agent_stories.terminus_2()), {"collect_rollout_details": True}),
    "terminus-2-raw": Golden(
        "terminus-2", lines(*agent_stories.terminus_2()), {"trajectory_config": {"raw_content": True}}
    ),
    "terminus-2-summary": Golden("terminus-2", summarised(), KEPT_SUMMARY),
    "terminus-2-linear": Golden("terminus-2", summarised(), LINEAR),
    "claude-code-subagent": Golden("claude-code", with_subagent()),
}


async def run(name: str, golden: Golden, folder: Path) -> Rollout:
    """The trial, in `folder / "trials" / name`."""
    task = write_task(
        folder / "hello",
        f'[ "$(cat /app/hello.txt)" = "{WANTED}" ] && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n',
        "",
        toml=f'[environment]\ndocker_image = "{AGENTS_IMAGE}"\nworkdir = "/app"\n',
        **{
            "instruction.md": f"Write the line `{WANTED}` into the file hello.txt.\n",
            "solution/solve.sh": f"echo '{WANTED}' > /app/hello.txt\n",
        },
    )
    (task.path / "environment").mkdir()
    async with trial_runner(
        ScriptedEngine(golden.script),
        folder,
        AgentConfig(name=golden.agent, install="never", kwargs=golden.kwargs),
        EnvironmentConfig(type="docker", network="gateway"),
        limits=RolloutConfig(agent_timeout_s=180, setup_timeout_s=60),
        max_new_tokens=4096,
        renderer=agent_stories.renderer("qwen3"),
    ) as runner:
        return await runner.run(attempt_at(task, name))


def keep(trial: Path, scratch: Path) -> None:
    """Copy what is kept of a trial to its place, scrubbed."""
    place = TRIALS / trial.name
    shutil.rmtree(place, ignore_errors=True)
    for pattern in KEPT:
        for number, file in enumerate(sorted(trial.glob(pattern)), 1):
            numbered = file.with_name(f"{number}.json") if file.parent.name == "completions" else file
            target = place / numbered.relative_to(trial)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(compact(scrub(file.read_text(), scratch)))


def compact(text: str) -> str:
    return json.dumps(json.loads(text)) + "\n" if len(text) > LONG else text


def scrub(text: str, scratch: Path) -> str:
    text = text.replace(f"{scratch}/trials", "/jobs/golden").replace(str(scratch), "/tasks")
    for pattern, word in SCRUBBED:
        text = pattern.sub(word, text)
    return text


async def make(name: str) -> None:
    golden = GOLDEN[name]
    with TemporaryDirectory() as scratch:
        rollout = await run(name, golden, Path(scratch))
        assert (rollout.reward, rollout.failure) == (1.0, None), rollout
        keep(Path(scratch) / "trials" / name, Path(scratch))
    size = sum(file.stat().st_size for file in (TRIALS / name).rglob("*") if file.is_file())
    version = json.loads((TRIALS / name / "result.json").read_text())["agent_info"]["version"]
    print(f"{name} {version}: {rollout.stats['calls']} calls, {size // 1000} kB", file=sys.stderr)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(GOLDEN)}; default: all")
    use_engine()
    need_image(AGENTS_IMAGE)
    for name in parser.parse_args().names or GOLDEN:
        await make(name)


if __name__ == "__main__":
    asyncio.run(main())
