"""Harbor's verifier behind a seal: what the agent left running or lying around cannot touch the grading.

A background process that rewrites the reward file would win otherwise. A service that the agent was asked to leave
running is gone too: such tasks need Docker. Left as it is: the working folder, so tests that import from it trust it
(`python -I` does not).
"""

# pyright: reportMissingTypeStubs=false

from typing import override

from harbor.models.task.config import VerifierEnvironmentMode
from harbor.models.task.verifier_mode import resolve_step_verifier_mode, resolve_task_verifier_mode
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.verifier import Verifier

from dockyard.rollout.sandbox.environment import SandboxEnvironment


class SealedVerifier(Verifier):
    """For `verifier.import_path`. In any environment but ours it is Harbor's own verifier."""

    @override
    async def verify(self) -> VerifierResult:
        if isinstance(self.environment, SandboxEnvironment) and self._is_shared_with_the_agent():
            await self.environment.seal()
        return await super().verify()

    def _is_shared_with_the_agent(self) -> bool:
        """A separate verifier environment is fresh, and holds the artifacts to grade."""
        config = self.task.config
        step = next((step for step in config.steps or [] if step.name == self.step_name), None)
        mode = resolve_step_verifier_mode(config, step) if step else resolve_task_verifier_mode(config)
        return mode == VerifierEnvironmentMode.SHARED
