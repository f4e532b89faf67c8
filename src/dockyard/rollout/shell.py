"""The `shell` agent, small enough for small models: ask, run the fenced command, show its output, ask again.

It runs in Dockyard's own process, so the environment needs no network.
"""

# pyright: reportMissingTypeStubs=false

import re
from typing import Any, override

import aiohttp
from harbor import AgentContext, BaseAgent, BaseEnvironment

from dockyard import __version__

API_KEY_VARIABLE = "DOCKYARD_API_KEY"  # named so that Harbor keeps its value out of the trial's files
SYSTEM_PROMPT = "You are a shell agent. Reply with one bash command in a ```bash code block and nothing else."
_FENCED = re.compile(r"```(?:bash|sh|shell)?[ \t]*\n(.*?)```", re.DOTALL)
MAX_TURNS = 8
_MAX_OUTPUT = 4000
_MERGED = "exec 2>&1\n"  # both outputs in order, in every environment; on a line of its own, whatever follows
_NO_MORE_CALLS = ("context_length_exceeded", "calls_limit_reached", "sampled_tokens_limit_reached")


class ShellAgent(BaseAgent):
    """Ends when the model replies without a command, or after `max_turns` replies."""

    def __init__(
        self,
        *args: Any,
        gateway_url: str,
        max_turns: int = MAX_TURNS,
        system_prompt: str = SYSTEM_PROMPT,
        examples: list[list[str]] | None = None,
        command_timeout_s: int = 30,
        **kwargs: Any,
    ) -> None:
        """`examples` are pairs of a request and the reply to it, shown before the task."""
        super().__init__(*args, **kwargs)  # pyright: ignore[reportUnknownMemberType]
        self._url = f"{gateway_url}/chat/completions"
        self._max_turns = max_turns
        self._command_timeout_s = command_timeout_s
        self._history = [_message("system", system_prompt)]
        for request, reply in examples or []:
            self._history += [_message("user", request), _message("assistant", reply)]

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
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as client:
            for _ in range(self._max_turns):
                reply = await self._ask(client)
                command = _FENCED.search(reply or "")
                if reply is None or command is None:
                    return
                result = await environment.exec(f"{_MERGED}{command[1]}", timeout_sec=self._command_timeout_s)
                output = f"{result.stdout or ''}{result.stderr or ''}"[-_MAX_OUTPUT:]
                shown = f"exit code {result.return_code}\n{output}".strip()
                self._history += [_message("assistant", reply), _message("user", shown)]

    async def _ask(self, client: aiohttp.ClientSession) -> str | None:
        """The model's reply, None when it may not be asked any more."""
        body = {"model": self.model_name or "policy", "messages": self._history}
        async with client.post(self._url, json=body) as response:
            answer = await response.json()
        if response.ok:
            return answer["choices"][0]["message"]["content"]
        if answer["error"]["code"] in _NO_MORE_CALLS:
            return None
        raise RuntimeError(f"the gateway answered {response.status}: {answer['error']['message']}")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
