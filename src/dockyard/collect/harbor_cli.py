"""Make rollouts with `harbor run` commands instead of Harbor's Python API, one command per attempt.

A job gives all its trials the same agent configuration, so the gateway could not distinguish trials of one job. The
phases of Harbor's process cannot be observed, so they have no limits of their own, and the model's key is valid until
the command has ended.
"""

# pyright: reportMissingTypeStubs=false

import asyncio
import ctypes
import json
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from harbor import TrialAgentConfig, TrialResult

from dockyard.collect.harbor_env_vars import QUIET
from dockyard.config import RolloutConfig
from dockyard.errors import UsageError
from dockyard.gateway.sessions import Session
from dockyard.rollout.agents.wiring import must_ask
from dockyard.rollout.job import read_result
from dockyard.rollout.outcome import Outcome, outcome_of, rollout_of
from dockyard.rollout.plan import Attempt
from dockyard.rollout.trial import TrialRunner
from dockyard.types import Rollout

_KEY_VARIABLE = "DOCKYARD_ROLLOUT_KEY"
"""Holds the model's key in the environment of one command. Harbor expands `${...}`, so no file contains the key."""
_STOP_S = 30.0
"""Time that Harbor has to remove what it started."""
_SHOWN_CHARS = 2000
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_UNSEEN = ("max_building", "max_running", "max_verifying")


def check_limits(limits: RolloutConfig) -> None:
    """Raise an error for settings that have no effect here."""
    for name in _UNSEEN:
        if limits.model_dump()[name] is not None:
            hint = "`--rollout.concurrency` limits the number of concurrent commands"
            raise UsageError(f"`rollout.{name}` has no effect with `--harbor-cli`", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborCliRunner:
    """Implements the pool's `Runner`."""

    common: TrialRunner
    """Holds what all rollouts of the run share, such as the gateway and the agent."""
    command: tuple[str, ...] = (sys.executable, "-m", "harbor.cli.main", "run")

    async def run(self, attempt: Attempt) -> Rollout:
        """Make one attempt. An error becomes a failure on the rollout; only cancellation is raised."""
        session = self.common.open_session(attempt)
        try:
            outcome = await self._outcome(attempt, session)
        finally:
            recording = self.common.gateway.close_session(session)
        return rollout_of(attempt.place, outcome, recording, must_ask=must_ask(self.common.agent))

    async def _outcome(self, attempt: Attempt, session: Session) -> Outcome:
        folder = self.common.trials_dir / attempt.name
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier try
        job = folder / f"job-{token_hex(4)}"  # a new name: the earlier try may still be writing
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{job.name}.json"
        file.write_text(json.dumps(self._job(attempt, job)))
        process = await self._start(file, session.key)
        limit_s = self.common.total_timeout_s(attempt.task)
        try:
            async with asyncio.timeout(limit_s):
                said, _ = await process.communicate()
        except TimeoutError:
            message = f"`harbor run` did not finish within {limit_s:g} s (`rollout.total_timeout_s`)"
            return Outcome(exception="RolloutTimeoutError", message=message)
        finally:
            await _end(process)
        return _read(job, said.decode(errors="replace"), process.returncode)

    async def _start(self, config: Path, key: str) -> Process:
        return await asyncio.create_subprocess_exec(
            *self.command,
            *("--config", str(config), "--yes", "--quiet"),
            env={**QUIET, **os.environ, _KEY_VARIABLE: key},
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,  # Ctrl-C must not reach it directly: `_end` stops it and its children
            preexec_fn=_ends_with(os.getpid()) if sys.platform == "linux" else None,
        )

    def _job(self, attempt: Attempt, job: Path) -> dict[str, Any]:
        """Return Harbor's `JobConfig` for one trial."""
        trial = self.common.trial_config(attempt, key=f"${{{_KEY_VARIABLE}}}")
        return {
            "job_name": job.name,
            "jobs_dir": str(job.parent),
            "n_attempts": 1,
            "n_concurrent_trials": 1,
            "environment_build_timeout_multiplier": trial.environment_build_timeout_multiplier,
            "agents": [_written(trial.agent)],
            "environment": trial.environment.model_dump(mode="json", exclude_defaults=True),
            "verifier": trial.verifier.model_dump(mode="json", exclude_defaults=True),
            "tasks": [{"path": str(attempt.task.path.absolute())}],
        }


def _written(agent: TrialAgentConfig) -> dict[str, Any]:
    """Return the agent with its environment unmasked: Harbor masks keys, but here they are only references."""
    return agent.model_dump(mode="json", exclude_defaults=True) | {"env": agent.env}


def _read(job: Path, said: str, code: int | None) -> Outcome:
    """Return the result of the job's only trial, or Harbor's output if there is none."""
    for trial in (path.parent for path in job.glob("*/config.json")):
        result = read_result(trial)
        if isinstance(result, TrialResult):
            return outcome_of(result)
    message = f"`harbor run` left no result (exit code {code}): {said.strip()[-_SHOWN_CHARS:]}"
    return Outcome(exception="HarborRunError", message=message)


def _ends_with(parent: int) -> Callable[[], None]:
    """Return a `preexec_fn` with which the kernel terminates the child when the thread that started it ends."""

    def request_signal() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the request
            os.kill(os.getpid(), signal.SIGTERM)

    return request_signal


async def _end(process: Process) -> None:
    """Terminate Harbor, which then cleans up; kill it if that takes too long."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
