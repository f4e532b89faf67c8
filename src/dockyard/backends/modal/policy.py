"""The other end of a `RemoteLearner`: a learner and its engine on a GPU, driven by the calls of one run.

Its folder is temporary. The run fetches what must be kept.
"""

import asyncio
import logging
import socket
from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

from dockyard.backends.modal.learner import CHUNK, read_groups
from dockyard.config import RunConfig
from dockyard.engine.model_dir import find_model
from dockyard.engine.protocol import Engine
from dockyard.engine.relay import read_request, write_generation
from dockyard.engine.relay_server import Handler, RelayServer
from dockyard.errors import DockyardError
from dockyard.run_dir.run import RunDir
from dockyard.trainer.learner import LocalLearner, open_embedded_learner
from dockyard.types import Json

logger = logging.getLogger(__name__)


async def keep_policy(listener: socket.socket, token: str, *, idle_s: float) -> None:
    """Serve one run's policy on this socket until there has been no call for `idle_s` seconds."""
    with TemporaryDirectory(prefix="dockyard-policy-") as scratch:
        policy = LearnerHost(Path(scratch))
        server = RelayServer(policy.handlers, token)
        try:
            await server.start(listener)
            await server.until_idle(idle_s)
        finally:
            await server.close()
            await policy.close()


class LearnerHost:
    """Answers the calls of a run. Calls that change the policy run one at a time."""

    def __init__(self, scratch: Path) -> None:
        self._sent = scratch / "sent"
        self._sent.mkdir()
        self._run_dir = scratch / "run"
        self._stack = AsyncExitStack()
        self._learner: LocalLearner | None = None
        self._saved: tuple[str, Path] | None = None
        self._turn = asyncio.Lock()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "write": self._write,
            "begin": self._begin,
            "describe": self._describe,
            "generate": self._generate,
            "update": self._update,
            "save": self._save,
            "read": self._read,
        }

    async def close(self) -> None:
        await self._stack.aclose()

    async def _write(self, body: Json) -> Json:
        """Store a part of the checkpoint to start from."""
        with (self._sent / Path(body["name"]).name).open("wb" if body["offset"] == 0 else "r+b") as file:
            file.seek(body["offset"])
            file.write(b64decode(body["data"]))
        return {}

    async def _begin(self, body: Json) -> Json:
        """Load the policy unless it is loaded already."""
        async with self._turn:
            learner = self._learner or await self._load(RunConfig.model_validate(body["config"]), body["checkpoint"])
            return {"version": learner.version}

    async def _load(self, config: RunConfig, checkpoint: int | None) -> LocalLearner:
        model_dir = await asyncio.to_thread(find_model, config.model.name)
        run = self._stack.enter_context(RunDir.create(self._run_dir, config, overwrite=True))
        if checkpoint is not None:
            with run.checkpoints.new(checkpoint) as folder:
                for file in self._sent.iterdir():
                    file.rename(folder / file.name)
        opening = open_embedded_learner(run, model_dir, logger.info)
        self._learner = learner = await self._stack.enter_async_context(opening)
        await learner.publish()
        return learner

    async def _describe(self, body: Json) -> Json:
        engine = self._opened_engine()
        return {"context_length": engine.context_length, "version": engine.version}

    async def _generate(self, body: Json) -> Json:
        return write_generation(await self._opened_engine().generate(read_request(body)))

    async def _update(self, body: Json) -> Json:
        async with self._turn:
            learner = self._opened_learner()
            if body["step"] != learner.version:
                raise DockyardError(
                    f"update {body['step']} was sent to a policy that has made {learner.version}",
                    hint="two processes drive one policy; stop one, then `--resume`",
                )
            metrics = await learner.update(await asyncio.to_thread(read_groups, body))
            await learner.publish()
            return {"metrics": metrics}

    async def _save(self, body: Json) -> Json:
        async with self._turn:
            learner = self._opened_learner()
            await learner.checkpoint()
            checkpoint = learner.run.checkpoints.latest()
            assert checkpoint is not None, "both ends know when to save"
            self._saved = token_hex(8), checkpoint.path
            sizes = {file.name: file.stat().st_size for file in sorted(checkpoint.path.iterdir())}
            return {"ticket": self._saved[0], "files": sizes}

    async def _read(self, body: Json) -> Json:
        """Return a part of a saved checkpoint; None if this process did not save it."""
        if self._saved is None or body["ticket"] != self._saved[0]:
            return {"data": None}
        with (self._saved[1] / Path(body["name"]).name).open("rb") as file:
            file.seek(body["offset"])
            return {"data": b64encode(file.read(CHUNK)).decode()}

    def _opened_learner(self) -> LocalLearner:
        assert self._learner is not None, "`begin` is the first call of a run"
        return self._learner

    def _opened_engine(self) -> Engine:
        engine = self._opened_learner().engine
        assert engine is not None, "an embedded learner has an engine"
        return engine
