"""What the scripted policy says to each agent: six turns or more, with thoughts, parallel calls and odd JSON.

Every story leaves `hello.txt` with `STORY_END` in the agent's folder, written and changed through its tools.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agent_clis import Desk, Ran
from npm_tokenizers import tokenizer_dir
from openai import AsyncOpenAI
from scripted_policy import Say, Script, ScriptedEngine, call, lines, odd_call, turn
from sdk_loop import converse

from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.server import Gateway, Timeouts
from dockyard.gateway.sessions import Recording, Session, TokenSessions

TASK = "Write a greeting into hello.txt and check it."
STORY_END = "thé ou café?\n"
UNTIL_LAST_WORDS = "for i in $(seq 900); do [ -e last-words ] && break; sleep 0.1; done; sleep 1"
"""A command that waits for `last_words`, and for as long as they take on their way. Agents end one after 120 s."""

type Start = Callable[[Desk], Awaitable[Ran]]
type Story = Callable[[Path], list[Say]]


def qwen_code(work: Path) -> list[Say]:
    file = str(work / "hello.txt")
    return [
        turn("I write it.", odd_call("write_file", content="café\n", file_path=file), thought=" What is asked?\n"),
        turn(
            "",
            call("run_shell_command", timeout=5000.0, command="cat hello.txt"),
            odd_call("read_file", file_path=file),
            thought="Is it there?",
        ),
        turn("  Two spaces.  ", call("edit", new_string="thé ou café", old_string="café", file_path=file)),
        Say("<think>\n\n</think>\n\n" + call("run_shell_command", command="printf '%s\\n' \"<|im_end|>\" é")),
        turn("", odd_call("edit", file_path=file, old_string="café", new_string="café?"), thought="A question.\n\n"),
        turn("Once more.", odd_call("grep_search", pattern="th", path=str(work))),
        turn("Done: thé.", thought="That is all."),
    ]


def claude_code(work: Path) -> list[Say]:
    file = str(work / "hello.txt")
    return [
        turn("I write it.", odd_call("Write", content="café\n", file_path=file), thought=" What is asked?\n"),
        turn(
            "",
            call("Bash", description="Show it", timeout=5000.0, command="cat hello.txt"),
            odd_call("Read", file_path=file),
            thought="Is it there?",
        ),
        turn("  Two spaces.  ", call("Edit", new_string="thé ou café", old_string="café", file_path=file)),
        Say("<think>\n\n</think>\n\n" + call("Bash", command="printf '%s\\n' \"<|im_end|>\" é")),
        turn("", odd_call("Edit", file_path=file, old_string="café", new_string="café?"), thought="A question.\n\n"),
        turn("Once more.", odd_call("Bash", description="Count", command="wc -c hello.txt")),
        turn("Done: thé.", thought="That is all."),
    ]


def claude_code_bare(work: Path) -> list[Say]:
    """It has no `Write`."""
    others = claude_code(work)[1:]
    write = odd_call("Bash", timeout=9000.0, command="echo café > hello.txt")
    return [turn("I write it.", write, thought=" What is asked?\n"), *others]


def codex(_: Path) -> list[Say]:
    return [
        turn("I write it.", odd_call("exec_command", cmd="echo café > hello.txt"), thought=" What is asked?\n"),
        turn(
            "",
            call("exec_command", yield_time_ms=5000.0, cmd="cat hello.txt"),
            odd_call("exec_command", cmd="pwd"),
            thought="Is it there?",
        ),
        turn("  Two spaces.  ", call("exec_command", login=False, cmd="sed -i 's/^/thé ou /' hello.txt")),
        Say("<think>\n\n</think>\n\n" + call("exec_command", cmd="printf '%s\\n' \"<|im_end|>\" é")),
        turn("", odd_call("exec_command", cmd="sed -i 's/$/?/' hello.txt"), thought="A question.\n\n"),
        turn("Once more.", odd_call("exec_command", cmd="wc -c hello.txt")),
        turn("Done: thé.", thought="That is all."),
    ]


def mini_swe_agent(_: Path) -> list[Say]:
    return [
        turn("I write it.", odd_call("bash", command="echo café > hello.txt"), thought=" What is asked?\n"),
        turn("", call("bash", command="cat hello.txt"), odd_call("bash", command="pwd"), thought="Is it there?"),
        turn("  Two spaces.  ", call("bash", command="sed -i 's/^/thé ou /' hello.txt")),
        Say("<think>\n\n</think>\n\n" + call("bash", command="printf '%s\\n' \"<|im_end|>\" é")),
        turn("", odd_call("bash", command="sed -i 's/$/?/' hello.txt"), thought="A question.\n\n"),
        turn("Done.", call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")),
    ]


def terminus_2() -> list[Say]:
    """No tools: commands are JSON in the text, and the end has to be said twice."""

    def say(*keystrokes: str, done: bool = False, thought: str = "") -> Say:
        commands = [{"keystrokes": keys, "duration": 0.3} for keys in keystrokes]
        answer = {"analysis": "é", "plan": "p", "commands": commands, "task_complete": done}
        return turn(json.dumps(answer, indent=1, separators=(" ,", ":")), thought=thought)

    return [
        say("echo café > hello.txt\n", thought=" What is asked?\n"),
        say("cat hello.txt\n", "pwd\n", thought="Is it there?"),
        say("sed -i 's/^/thé ou /' hello.txt\n"),
        Say("<think>\n\n</think>\n\n" + say("printf '%s\\n' \"<|im_end|>\" é\n").text),
        say("sed -i 's/$/?/' hello.txt\n", thought="A question.\n\n"),
        say("wc -c hello.txt\n"),
        say(done=True),
        say(done=True, thought="That is all."),
    ]


def last_words(folder: Path, said: Say) -> Script:
    """A line after which there is a file in the folder of the agent that works in this one."""

    def speak(_: str) -> Say:
        (folder / "work" / "last-words").touch()
        return said

    return speak


def aider(_: Path) -> list[Say]:
    """No tools either: whole files in the text."""
    contents = ["café", "thé", "thé!", "thé?", "thé ou", STORY_END.strip()]
    return [turn(f"Here:\n\nhello.txt\n```\n{text}\n```", thought="Hm." if text == "thé" else "") for text in contents]


def openai_sdk(_: Path = Path()) -> list[Say]:
    return [
        turn("I add.", odd_call("add", b=2.0, a=1), thought=" What is asked?\n"),
        turn("", call("add", a=3, b=4), odd_call("add", a=5, b=6), thought="Two more."),
        turn("  Spaces.  ", call("add", b=1, a=1, note="é")),
        Say("<think>\n\n</think>\n\n" + call("add", a=2, b=2)),
        turn("", odd_call("add", a=9, b=1)),
        turn("It is ten.", thought="So."),
    ]


async def _run_aider(desk: Desk) -> Ran:
    """Two requests, each tested up to four times; the sixth test passes."""
    requests = desk.folder / "requests.txt"
    requests.parent.mkdir(parents=True, exist_ok=True)
    requests.write_text(f"/code {TASK}\n")
    test = "echo . >> ../tests.txt; [ $(wc -l < ../tests.txt) -ge 6 ]"
    return await desk.aider("Go on.", "--auto-test", "--test-cmd", test, "--load", str(requests))


async def _run_openai_sdk(desk: Desk) -> Ran:
    async with AsyncOpenAI(base_url=desk.url, api_key=desk.key) as client:
        messages = await converse(client)
    return Ran(0, messages[-1]["content"])


STORIES: dict[str, tuple[Story, Start]] = {
    "qwen-code": (qwen_code, lambda desk: desk.qwen_code(TASK)),
    "claude-code": (claude_code, lambda desk: desk.claude_code(TASK)),
    "claude-code --bare": (claude_code_bare, lambda desk: desk.claude_code(TASK, "--bare")),
    "codex": (codex, lambda desk: desk.codex(TASK)),
    "mini-swe-agent": (mini_swe_agent, lambda desk: desk.mini_swe_agent(TASK)),
    "aider": (aider, _run_aider),
    "OpenAI SDK loop": (openai_sdk, _run_openai_sdk),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolled:
    """A finished run of a CLI against the gateway."""

    ran: Ran
    engine: ScriptedEngine
    recording: Recording
    work: Path

    def read(self, name: str) -> str:
        return (self.work / name).read_text()


async def tell(name: str, folder: Path, model: str = "qwen3") -> Rolled:
    """An agent's whole story."""
    story, start = STORIES[name]
    return await roll_out(start, lines(*story(folder / "work")), folder, model)


async def roll_out(start: Start, script: Script, folder: Path, model: str = "qwen3") -> Rolled:
    """Run a CLI with the scripted policy behind a gateway of its own."""
    engine = ScriptedEngine(script, model=model)
    async with served(engine) as gateway:
        session = open_session(gateway)
        desk = Desk(folder, gateway.url, session.key)
        ran = await start(desk)
        return Rolled(ran=ran, engine=engine, recording=gateway.close_session(session), work=desk.work)


@asynccontextmanager
async def served(engine: ScriptedEngine, timeouts: Timeouts | None = None) -> AsyncGenerator[Gateway]:
    gateway = Gateway(TokenSessions(engine, renderer(engine.model)), "policy", timeouts=timeouts)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.close()


@cache
def renderer(model: str) -> Renderer:
    return Renderer.load(tokenizer_dir(model))


def open_session(gateway: Gateway) -> Session:
    return gateway.open_session("agent", seed=0, temperature=1.0, max_new_tokens=4096)
