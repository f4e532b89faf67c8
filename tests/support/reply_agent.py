"""A Harbor agent for tests: asks the model once and leaves its reply in /app/reply.txt."""

import asyncio
import itertools
import shlex
from pathlib import Path
from typing import Any

import aiohttp
from harbor import AgentContext, BaseAgent, BaseEnvironment


class ReplyAgent(BaseAgent):
    @staticmethod
    def name() -> str:
        return "reply"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None: ...

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        headers = {"Authorization": f"Bearer {self._extra_env['OPENAI_API_KEY']}"}
        body = {"model": "policy", "messages": [{"role": "user", "content": instruction}]}
        url = f"{self._extra_env['OPENAI_BASE_URL']}/chat/completions"
        async with aiohttp.ClientSession(headers=headers) as client, client.post(url, json=body) as response:
            text = (await response.json())["choices"][0]["message"]["content"]
        await environment.exec(f"printf %s {shlex.quote(text.replace(chr(0), ''))} > reply.txt")


class HeldAgent(ReplyAgent):
    """The n-th of a process waits as long as something in this folder is named by n or a smaller number."""

    _numbers = itertools.count(1)

    def __init__(self, *args: Any, hold: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hold = Path(hold)

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        number = next(self._numbers)
        while any(int(file.name) <= number for file in self._hold.iterdir()):
            await asyncio.sleep(0.01)
        await super().run(instruction, environment, context)
