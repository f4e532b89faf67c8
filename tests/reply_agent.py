"""A Harbor agent for tests: asks the model once and leaves its reply in /app/reply.txt."""

import shlex

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
