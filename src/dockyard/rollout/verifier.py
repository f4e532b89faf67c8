"""Harbor's verifier behind a seal: processes and files that the agent left behind cannot affect the grading.

Otherwise a background process could rewrite the reward file. The seal also ends a service that the agent was asked to
leave running, unless the settings turn it off. It keeps the working folder, so tests that import from it trust it
(`python -I` does not). A grading that fails is repeated once.
"""

# pyright: reportMissingTypeStubs=false

import asyncio
from typing import Any, Protocol, override, runtime_checkable

from harbor.models.task.config import StepConfig, VerifierEnvironmentMode
from harbor.models.task.verifier_mode import (
    resolve_step_verifier_mode,
    resolve_task_verifier_mode,
    resolve_verifier_environment_definition,
)
from harbor.models.verifier.result import VerifierResult
from harbor.trial.errors import VerifierTimeoutError
from harbor.verifier.verifier import (
    AddTestsDirError,
    DownloadVerifierDirError,
    RewardFileEmptyError,
    RewardFileNotFoundError,
    Verifier,
    VerifierOutputParseError,
)

VERIFIER = "dockyard.rollout.verifier:SealedVerifier"
"""For Harbor's `verifier.import_path`."""
ABOVE_TESTS = ("/conftest.py", "/pytest.ini", "/.pytest.ini", "/tox.ini", "/setup.cfg", "/pyproject.toml")
"""Files that pytest reads in the folders above /tests."""
GRADED_AGAIN = (
    AddTestsDirError,
    DownloadVerifierDirError,
    RewardFileEmptyError,
    RewardFileNotFoundError,
    VerifierOutputParseError,
    VerifierTimeoutError,
)


@runtime_checkable
class Sealable(Protocol):
    """An environment that can be made safe for grading."""

    async def seal(self) -> None: ...


class SealedVerifier(Verifier):
    """For `verifier.import_path`. An environment without a seal is graded as by Harbor."""

    def __init__(self, *args: Any, timeout_s: float | None = None, seal: bool = True, **kwargs: Any) -> None:
        """`timeout_s` limits one grading; Harbor's own limit must leave time for two."""
        super().__init__(*args, **kwargs)
        self._timeout_s = timeout_s
        self._seal = seal
        if not self._is_shared_with_the_agent():
            # Harbor sets this for its own verifier only: an image built from tests/ contains the tests already.
            definition = resolve_verifier_environment_definition(self.task.config, self.task.paths, self._step)
            self._skip_tests_upload = definition is not None and definition.bundled_tests

    @override
    async def verify(self) -> VerifierResult:
        try:
            return await self._grade()
        except GRADED_AGAIN as error:
            self.logger.warning("grading once more after %s: %s", type(error).__name__, error)
            return await self._grade()

    async def _grade(self) -> VerifierResult:
        if self._seal and isinstance(self.environment, Sealable) and self._is_shared_with_the_agent():
            await self.environment.seal()
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await super().verify()
        except TimeoutError as error:
            if limit.expired():
                raise VerifierTimeoutError(f"one grading took longer than {self._timeout_s:g} s") from error
            raise

    @property
    def _step(self) -> StepConfig | None:
        return next((step for step in self.task.config.steps or [] if step.name == self.step_name), None)

    def _is_shared_with_the_agent(self) -> bool:
        """Whether the agent worked in this environment. A separate one is new, and contains the artifacts to grade."""
        config, step = self.task.config, self._step
        mode = resolve_step_verifier_mode(config, step) if step else resolve_task_verifier_mode(config)
        return mode == VerifierEnvironmentMode.SHARED
