"""The caller's side: train on this machine with the policy on Modal, or start a whole run on Modal."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import modal
from grpclib.exceptions import StreamTerminatedError

from dockyard.backends.modal.app import MOUNT, VOLUME, serve_policy, train_there, volume
from dockyard.backends.modal.learner import RemoteLearner, open_remote_learner
from dockyard.config import RunConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.rl.functions import check_functions
from dockyard.run_dir.run import RunDir
from dockyard.trainer.run import run_training

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 1800.0  # until a GPU is free and the model is loaded
_MAX_FAILED_STARTS = 3
_PATHS = ("model.name", "tasks.train", "tasks.heldout", "tasks.dataset", "tasks.registry", "tasks.repositories")
"""Settings that may be paths on the caller's machine."""
_FUNCTIONS = ("grpo.advantage", "grpo.loss", "grpo.reward")
"""Settings that may name a module on the caller's machine."""
_UNREACHABLE = (
    modal.exception.ConnectionError,
    modal.exception.ServiceError,
    modal.exception.InternalError,
    modal.exception.ResourceExhaustedError,
    StreamTerminatedError,
    OSError,
)
"""Errors of Modal itself or of the network, which say nothing about the function."""


def train_with_remote_policy(config: RunConfig, *, run_dir: RunDir, gpu: str, secret_names: Sequence[str]) -> None:
    """Run the loop, the gateway and the rollouts on this machine, with the policy on Modal."""
    if config.engine.type != "transformers":
        message = f"`engine.type` is `{config.engine.type}`, but a policy on Modal has its own engine"
        raise UsageError(message, hint="`--engine.type transformers`, or `dockyard train` without Modal")
    if config.trainer.keep_best:
        message = (
            "`trainer.keep_best` needs every version's adapter here, but a policy on Modal sends only its checkpoints"
        )
        raise UsageError(message, hint="remove it, or use `--env modal` to run everything there")
    check_functions(config.grpo, remote=True)
    with modal.Dict.ephemeral() as board:
        call = PolicyCall(serve_policy.with_options(gpu=gpu, secrets=_named(secret_names)), board)
        model = uploaded(config.model.name)

        def open_remote(run: RunDir) -> AbstractAsyncContextManager[RemoteLearner]:
            return open_remote_learner(run, call.find, call.token, model=model, patience_s=_START_TIMEOUT_S)

        try:
            run_training(config, run_dir=run_dir, open_remote=open_remote)
        finally:
            call.end()


def train_on_modal(words: Sequence[str], name: str, *, resume: bool, gpu: str, secret_names: Sequence[str]) -> int:
    """Run everything on Modal under this name and return the exit code. `words` are arguments of `dockyard train`."""
    _refuse_functions(words)
    function = train_there.with_options(gpu=gpu, secrets=_named(secret_names))
    code = function.spawn([with_uploaded_path(word) for word in words], name, resume).get()
    logger.info("the run is in the volume; download it with `modal volume get %s runs/%s runs/`", VOLUME, name)
    return code


def _refuse_functions(words: Sequence[str]) -> None:
    """Refuse user-defined functions, whose modules are on the caller's machine only."""
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        if name in _FUNCTIONS and ":" in value:
            message = f"`{name}` is `{value}`, but the run is on Modal, which does not have your module"
            raise UsageError(message, hint=f"remove `{name}`, or train with `dockyard train`")


def with_uploaded_path(word: str) -> str:
    """Return the argument with a local path replaced by its copy on Modal."""
    name, equals, value = word.partition("=")
    return f"{name}={uploaded(value)}" if equals and name.removeprefix("--") in _PATHS else word


def uploaded(value: str) -> str:
    """Copy a local file or folder to the volume and return its path there. Return other names unchanged."""
    path = Path(value).expanduser()
    if not path.exists():
        return value
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()
    place = f"sent/{digest}/{path.resolve().name}"
    logger.info("copying %s to the volume %s", path, VOLUME)
    with volume.batch_upload(force=True) as upload:
        batch: Any = upload
        (batch.put_directory if path.is_dir() else batch.put_file)(str(path), f"/{place}")
    return str(MOUNT / place)


class PolicyCall:
    """The function call that serves the policy of a run. `find` starts it, and restarts it when it has ended."""

    def __init__(self, function: modal.Function[..., Any, Any], board: modal.Dict) -> None:
        self.token = secrets.token_urlsafe(32)
        self._function = function
        self._board = board
        self._call: modal.FunctionCall[Any] | None = None
        self._url: str | None = None
        self._failed_starts = 0

    async def find(self) -> str | None:
        """Return the last known URL of the policy; None while it starts."""
        try:
            self._url = await asyncio.to_thread(self._find)
        except _UNREACHABLE as error:
            logger.info("Modal does not answer: %s", error)
        return self._url

    def end(self) -> None:
        """Stop the function, which releases its GPU."""
        try:
            if self._call:
                self._call.cancel(terminate_containers=True)
        except _UNREACHABLE as error:
            logger.warning("Modal does not answer; the policy's function will end by itself when idle: %s", error)

    def _find(self) -> str | None:
        if self._call is None or self._has_ended(self._call):
            self._board.pop("url", None)
            self._call = self._function.spawn(self.token, self._board)
        return self._board.get("url")

    def _has_ended(self, call: modal.FunctionCall[Any]) -> bool:
        try:
            call.get(timeout=0)
        except TimeoutError:
            return False
        except _UNREACHABLE:
            raise
        except Exception as error:  # Modal raises here whatever ended it; the next call may succeed
            logger.warning("the policy's function ended: %s: %s", type(error).__name__, error)
            self._count_failed_start(error)
        return True

    def _count_failed_start(self, error: Exception) -> None:
        self._failed_starts = 0 if self._board.get("url") else self._failed_starts + 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            raise DockyardError(
                f"the policy's function ended {_MAX_FAILED_STARTS} times before it was ready: {error}",
                hint="see `modal app logs dockyard`",
            ) from error


def _named(names: Sequence[str]) -> list[modal.Secret]:
    return [modal.Secret.from_name(name) for name in names]
