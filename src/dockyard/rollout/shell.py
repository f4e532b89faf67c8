"""The `shell` agent for small models: ask the model, run the fenced command, show its output, ask again.

It runs in Dockyard's own process, so the environment needs no network. With `commands`, each turn runs one command from
that list and no shell expands it, so that no pipe, loop or `$(...)` does the work of several turns in one.
"""

# pyright: reportMissingTypeStubs=false

import json
import re
import shlex
from collections.abc import Sequence
from typing import Any, Literal, override

import aiohttp
from harbor import AgentContext, BaseAgent, BaseEnvironment
from harbor.agents.capabilities import AgentCapabilities
from harbor.models.trajectories import Agent, Step, Trajectory

from dockyard import __version__

API_KEY_VARIABLE = "DOCKYARD_API_KEY"  # named so that Harbor keeps its value out of the trial's files
SYSTEM_PROMPT = "You are a shell agent. Reply with one bash command in a ```bash code block and nothing else."
MAX_TURNS = 8
_OPERATORS = "();<>|&"
_FENCED = re.compile(r"```(?:bash|sh|shell)?[ \t]*\n(.*?)```", re.DOTALL)
_MAX_OUTPUT = 4000
_MERGED = "exec 2>&1\n"  # both outputs in order, in every environment; on its own line, whatever follows
_NOT_RUN = "exit code 126"  # a shell's code for a command that cannot be executed
_NO_MORE_CALLS = ("context_length_exceeded", "calls_limit_reached", "sampled_tokens_limit_reached")


def one_command(text: str, allowed: Sequence[str]) -> str | None:
    """Return the command with each word quoted; None unless it is allowed, with at most a `> FILE` at its end."""
    words = _words(text)
    if not words or words[0] not in allowed:
        return None
    if len(words) > 2 and words[-2] == ">":
        words, target = words[:-2], f" > {shlex.quote(words[-1])}"
    else:
        target = ""
    if any(set(word) <= set(_OPERATORS) for word in words):
        return None
    return shlex.join(words) + target


def rule(allowed: Sequence[str]) -> str:
    """Return the message to the model for a command that is not run."""
    return f"Only one command at a time: {' or '.join(allowed)}, with at most one > FILE."


def _words(text: str) -> list[str]:
    """Return the words of the command; none if it has several lines or an unclosed quote."""
    if "\n" in text.strip():
        return []
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:
        return []


class ShellAgent(BaseAgent):
    """Ends when the model replies without a command, or after `max_turns` replies."""

    capabilities = AgentCapabilities(atif=True)

    def __init__(
        self,
        *args: Any,
        gateway_url: str,
        max_turns: int = MAX_TURNS,
        system_prompt: str = SYSTEM_PROMPT,
        examples: list[list[str]] | None = None,
        command_timeout_s: int = 30,
        commands: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """`examples` are pairs of a request and the reply to it, shown before the task.

        With `commands`, a turn is one of these with its arguments: nothing that a shell would expand or chain is run.
        """
        super().__init__(*args, **kwargs)  # pyright: ignore[reportUnknownMemberType]
        self._url = f"{gateway_url}/chat/completions"
        self._max_turns = max_turns
        self._command_timeout_s = command_timeout_s
        self._commands = commands
        self._history = [_message("system", system_prompt)]
        for request, reply in examples or []:
            self._history += [_message("user", request), _message("assistant", reply)]
        self._num_opening = len(self._history)
        self._thoughts: dict[int, str] = {}
        """Reasoning by the index of its reply. It is not sent back, because the gateway still has it."""

    @staticmethod
    @override
    def name() -> str:
        return "shell"

    @override
    def version(self) -> str:
        return __version__

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing to install."""

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        self._history.append(_message("user", instruction.strip()))
        headers = {"Authorization": f"Bearer {self._extra_env[API_KEY_VARIABLE]}"}
        timeout = aiohttp.ClientTimeout(total=None)  # the trial has a time limit of its own
        try:
            async with aiohttp.ClientSession(headers=headers, timeout=timeout) as client:
                await self._converse(client, environment)
        finally:
            self._write_trajectory()

    async def _converse(self, client: aiohttp.ClientSession, environment: BaseEnvironment) -> None:
        for _ in range(self._max_turns):
            command = _FENCED.search(await self._ask(client) or "")
            if command is None:
                return
            self._history.append(_message("user", await self._outcome(command[1], environment)))

    async def _outcome(self, text: str, environment: BaseEnvironment) -> str:
        """Run the model's command and return what it is shown of the result."""
        command = text if self._commands is None else one_command(text, self._commands)
        if command is None:
            return f"{_NOT_RUN}\n{rule(self._commands or [])}"
        result = await environment.exec(f"{_MERGED}{command}", timeout_sec=self._command_timeout_s)
        output = f"{result.stdout or ''}{result.stderr or ''}"[-_MAX_OUTPUT:]
        return f"exit code {result.return_code}\n{output}".strip()

    async def _ask(self, client: aiohttp.ClientSession) -> str | None:
        """Return the model's reply; None if no more calls are allowed."""
        body = {"model": self.model_name or "policy", "messages": self._history}
        async with client.post(self._url, json=body) as response:
            answer = await response.json()
        if response.ok:
            return self._record(answer["choices"][0]["message"])
        if answer["error"]["code"] in _NO_MORE_CALLS:
            return None
        raise RuntimeError(f"the gateway answered {response.status}: {answer['error']['message']}")

    def _record(self, reply: dict[str, Any]) -> str:
        """Append the reply to the history and return its text."""
        if thought := reply.get("reasoning_content"):
            self._thoughts[len(self._history)] = thought
        self._history.append(_message("assistant", reply["content"] or ""))
        return self._history[-1]["content"]

    def _write_trajectory(self) -> None:
        """Write the conversation to Harbor's files. Examples are marked as copied context."""
        agent = Agent(name=self.name(), version=self.version(), model_name=self.model_name)
        steps = [self._step(place, message) for place, message in enumerate(self._history)]
        trajectory = Trajectory(agent=agent, session_id=self.logs_dir.parent.name, steps=steps)
        data = json.dumps(trajectory.to_json_dict(), indent=1).encode()
        (self.logs_dir / "trajectory.json").write_bytes(data)

    def _step(self, place: int, message: dict[str, str]) -> Step:
        sources: dict[str, Literal["system", "user", "agent"]] = {"system": "system", "assistant": "agent"}
        return Step(
            step_id=place + 1,
            source=sources.get(message["role"], "user"),
            message=message["content"],
            reasoning_content=self._thoughts.get(place),
            is_copied_context=True if place < self._num_opening else None,
        )


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
