"""A Harbor agent for tests: as `ReplyAgent`, but in one trial its sandbox dies before the model is asked."""

from harbor import BaseEnvironment
from reply_agent import ReplyAgent

from dockyard.rollout.sandbox.environment import SandboxEnvironment


class MortalAgent(ReplyAgent):
    """Dies in trials whose name ends in `mortal`."""

    async def setup(self, environment: BaseEnvironment) -> None:
        if environment.session_id.removesuffix("__env").endswith("mortal"):
            assert isinstance(environment, SandboxEnvironment)
            await environment._running().stop()
        await environment.exec("true")
