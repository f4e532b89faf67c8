"""A Harbor agent for tests: it asks a helper, with a history of its own, and then works with its own."""

import re

import aiohttp
from harbor import AgentContext, BaseEnvironment
from reply_agent import ReplyAgent


class ForkingAgent(ReplyAgent):
    """Two conversations, so two segments, unless the task is marked as easy."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        headers = {"Authorization": f"Bearer {self._extra_env['OPENAI_API_KEY']}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            if "copy" not in instruction.lower():
                await self._ask(client, f"Give me a hint: {instruction}")
            said = await self._ask(client, instruction)
        command = re.search(r"```bash\n(.*?)```", said, re.DOTALL)
        await environment.exec(command[1] if command else "true")

    async def _ask(self, client: aiohttp.ClientSession, text: str) -> str:
        body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
        async with client.post(f"{self._extra_env['OPENAI_BASE_URL']}/chat/completions", json=body) as response:
            return (await response.json())["choices"][0]["message"]["content"]
