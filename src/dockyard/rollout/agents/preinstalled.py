"""Classes derived from Harbor's agents that use the program in the image instead of Harbor's installer.

Harbor imports agents by `module:Class`, so this module creates a class when its name is accessed: `QwenCoder` runs
Harbor's installer if the image has no `qwen`, `QwenCoderNever` raises `AgentMissingError` instead.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import logging
import shlex
from functools import cache
from typing import Any, ClassVar, cast, override

from harbor import BaseAgent, BaseEnvironment
from harbor.agents.installed.base import BaseInstalledAgent

from dockyard.rollout.agents.table import ROWS, Program
from dockyard.rollout.agents.wiring import class_name, class_of

_MISSING = 127
_log = logging.getLogger(__name__)
_versions: dict[tuple[str, str], str] = {}
"""Versions by agent and image. Cached per process, because asking a program can take seconds."""


class AgentMissingError(RuntimeError):
    """The image does not have the program, and the run may not install it."""


class Preinstalled(BaseAgent):
    """A mixin for Harbor's agent classes that runs their installer only if necessary."""

    program: ClassVar[Program]
    may_install: ClassVar[bool]

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        self._found = await self._find(environment)
        if not self._found and not self.may_install:
            raise AgentMissingError(self._missing(environment))
        await super().setup(environment)

    async def install(self, environment: BaseEnvironment) -> None:
        """Called only by the setup of agents that Harbor installs."""
        if self._found:
            return
        _log.info("%s: running Harbor's installer, because %s", self.name(), self._missing(environment))
        await cast(BaseInstalledAgent, super()).install(environment)

    async def _find(self, environment: BaseEnvironment) -> bool:
        """Whether the program exists, in the requested version if there is one. Needs one command."""
        known = (self.name(), _image(environment))
        wanted = self.version()
        ask = ":" if known in _versions else self._version_command()
        program = self.program
        there = f"command -v {shlex.quote(program.executable)} >/dev/null || exit {_MISSING}"
        command = f"{program.path}; {there}; {{ {program.prepare}; }} >/dev/null || exit {_MISSING}; {ask} || true"
        result = await environment.exec(command)
        self._said = f"{result.stdout or ''}{result.stderr or ''}".strip()[-200:]
        if result.return_code != 0:
            return False
        if not isinstance(self, BaseInstalledAgent):
            return True
        version = _versions.setdefault(known, self.parse_version(result.stdout or ""))
        if wanted not in (None, version):
            return False
        self._version = version or None
        return True

    def _version_command(self) -> str:
        theirs = self.get_version_command() if isinstance(self, BaseInstalledAgent) else None
        return self.program.version or theirs or ":"

    def _missing(self, environment: BaseEnvironment) -> str:
        wanted = f" {self.version()}" if self.version() and isinstance(self, BaseInstalledAgent) else ""
        said = f" ({self._said})" if self._said else ""
        return (
            f"`{self.program.executable}`{wanted} is not in the image `{_image(environment)}`{said}: "
            'add it to the image, or let Harbor install it with `agent.install = "auto"`'
        )


def _image(environment: BaseEnvironment) -> str:
    return environment.task_env_config.docker_image or str(environment.environment_dir)


_AGENTS = {
    class_name(agent, may_install=may_install): (agent, may_install)
    for agent, row in ROWS.items()
    if row.program
    for may_install in (True, False)
}


@cache
def __getattr__(name: str) -> Any:
    if name not in _AGENTS:
        raise AttributeError(f"module `{__name__}` has no `{name}`")
    agent, may_install = _AGENTS[name]
    body = {"program": ROWS[agent].program, "may_install": may_install, "__module__": __name__}
    return type(name, (Preinstalled, class_of(agent)), body)
