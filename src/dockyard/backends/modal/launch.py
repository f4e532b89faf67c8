"""From the caller's side: a run here whose policy is on Modal, and a run that is there as a whole."""

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
from dockyard.run_dir.run import RunDir
from dockyard.trainer.run import run_training

logger = logging.getLogger(__name__)

_PATIENCE_S = 1800.0  # for a GPU to be free, and the model to be loaded
_MOST_FALSE_STARTS = 3
_PATHS = ("model.name", "tasks.train", "tasks.heldout", "tasks.dataset", "tasks.registry", "tasks.repositories")
"""Settings that may name something on the caller's machine."""
_OUT_OF_REACH = (
    modal.exception.ConnectionError,
    modal.exception.ServiceError,
    modal.exception.InternalError,
    modal.exception.ResourceExhaustedError,
    StreamTerminatedError,
    OSError,
)
"""What says nothing of a function: Modal itself, or the network, does not answer."""


def train_from_here(config: RunConfig, *, run_dir: RunDir, gpu: str, secret_names: Sequence[str]) -> None:
    """`run_training` with loop, gateway and rollouts here, and the policy on Modal."""
    if config.engine.type != "transformers":
        message = f"`engine.type` is `{config.engine.type}`, but on Modal the policy has an engine of its own"
        raise UsageError(message, hint="`--engine.type transformers`, or `dockyard train` without Modal")
    if config.trainer.keep_best:
        message = "`trainer.keep_best` needs every version's adapter here, and a policy on Modal sends its checkpoints"
        raise UsageError(message, hint="`--env modal` runs all of it there; or leave it out")
    with modal.Dict.ephemeral() as board:
        call = PolicyCall(serve_policy.with_options(gpu=gpu, secrets=_named(secret_names)), board)
        model = sent(config.model.name)

        def open_remote(run: RunDir) -> AbstractAsyncContextManager[RemoteLearner]:
            return open_remote_learner(run, call.find, call.token, model=model, patience_s=_PATIENCE_S)

        try:
            run_training(config, run_dir=run_dir, open_remote=open_remote)
        finally:
            call.end()


def train_over_there(words: Sequence[str], name: str, *, resume: bool, gpu: str, secret_names: Sequence[str]) -> int:
    """A whole run on Modal under this name; its exit code. `words` are arguments of `dockyard train`."""
    function = train_there.with_options(gpu=gpu, secrets=_named(secret_names))
    code = function.spawn([with_sent(word) for word in words], name, resume).get()
    logger.info("the run is in the volume: `modal volume get %s runs/%s runs/`", VOLUME, name)
    return code


def with_sent(word: str) -> str:
    """An argument as it is to be written over there."""
    name, equals, value = word.partition("=")
    return f"{name}={sent(value)}" if equals and name.removeprefix("--") in _PATHS else word


def sent(value: str) -> str:
    """What this machine has under this name is copied to the volume; its place there. Other names stay."""
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
    """The function call that serves a run's policy: begun when it is looked for, and again whenever it has ended."""

    def __init__(self, function: modal.Function[..., Any, Any], board: modal.Dict) -> None:
        self.token = secrets.token_urlsafe(32)
        self._function = function
        self._board = board
        self._call: modal.FunctionCall[Any] | None = None
        self._url: str | None = None
        self._false_starts = 0

    async def find(self) -> str | None:
        """Where the policy is, or was last heard of; None while it starts."""
        try:
            self._url = await asyncio.to_thread(self._find)
        except _OUT_OF_REACH as error:
            logger.info("Modal does not answer: %s", error)
        return self._url

    def end(self) -> None:
        """Give the GPU back."""
        try:
            if self._call:
                self._call.cancel(terminate_containers=True)
        except _OUT_OF_REACH as error:
            logger.warning("Modal does not answer, the policy's function ends by itself: %s", error)

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
        except _OUT_OF_REACH:
            raise
        except Exception as error:  # whatever ended it, Modal raises it here; the next call may go better
            logger.warning("the policy's function ended: %s: %s", type(error).__name__, error)
            self._count_false_start(error)
        return True

    def _count_false_start(self, error: Exception) -> None:
        self._false_starts = 0 if self._board.get("url") else self._false_starts + 1
        if self._false_starts >= _MOST_FALSE_STARTS:
            raise DockyardError(
                f"the policy's function ended {_MOST_FALSE_STARTS} times before it could be asked anything: {error}",
                hint="`modal app logs dockyard` says more",
            ) from error


def _named(names: Sequence[str]) -> list[modal.Secret]:
    return [modal.Secret.from_name(name) for name in names]
