"""A Harbor agent for benchmarks: a number of model calls, each followed by a slow command in the sandbox."""

import shlex
import zlib
from typing import Any

import aiohttp
from harbor import AgentContext, BaseAgent, BaseEnvironment


class TurnsAgent(BaseAgent):
    """Makes model calls and runs commands at a given rate, without solving the task."""

    def __init__(self, *args: Any, turns: int, sandbox_s: float, spread: float, observed: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = turns
        self._sandbox_s = sandbox_s
        self._spread = spread
        self._observed = observed

    @staticmethod
    def name() -> str:
        return "turns"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None: ...

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """The output of a command depends on the model's reply, so that all rollouts differ."""
        messages = [{"role": "user", "content": instruction}]
        headers = {"Authorization": f"Bearer {self._extra_env['OPENAI_API_KEY']}"}
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
            for _ in range(self._turns):
                said = await self._ask(http, messages)
                seen = await self._act(environment, said)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": seen}]

    async def _ask(self, http: aiohttp.ClientSession, messages: list[Any]) -> str:
        url = f"{self._extra_env['OPENAI_BASE_URL']}/chat/completions"
        async with http.post(url, json={"model": "policy", "messages": messages}) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer["choices"][0]["message"]["content"] or ""

    async def _act(self, environment: BaseEnvironment, said: str) -> str:
        number = zlib.crc32(said.encode())
        sleep_s = self._sandbox_s * (1 + self._spread * (number / 2**31 - 1))
        start = number % 10**6
        numbers = f"seq -s ' ' {start} {start + self._observed} | head -c {self._observed}"
        reply = shlex.quote(said.replace("\0", ""))
        done = await environment.exec(f"printf %s {reply} > reply.txt; sleep {sleep_s:.3f}; {numbers}")
        return done.stdout or ""
