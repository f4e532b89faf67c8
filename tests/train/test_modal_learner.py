"""A learner behind a relay, on real weights: its server is replaced at every moment that could matter."""

import asyncio
import shutil
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from tiny_policy import make_group, tiny_model_dir

from dockyard.backends.modal.learner import RemoteLearner, open_remote_learner, recorded_groups
from dockyard.backends.modal.policy import LearnerHost
from dockyard.config import RunConfig
from dockyard.engine.protocol import GenerateRequest, Generation
from dockyard.engine.relay import Handler, RelayServer
from dockyard.errors import EngineError
from dockyard.run_dir.run import RunDir, step_phase
from dockyard.trainer.learner import load_learner
from dockyard.types import Group, Json, Rollout

TOKEN = "token"
STEPS = 4


def config_of(path: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": path,
            "steps": STEPS,
            "model": {"name": str(tiny_model_dir()), "device": "cpu", "dtype": "float32"},
            "engine": {"deterministic": True},
            "trainer": {"lr": 0.01, "lora_r": 4, "save_every": 2},
        }
    )


def groups_of(step: int) -> tuple[Group, ...]:
    group = make_group([1.0, 0.0, float(step), None])
    rollouts = tuple(replace(rollout, seconds={"total": 1.0 * step}) for rollout in group.rollouts)
    return (replace(group, rollouts=rollouts),)


@dataclass
class Host:
    """Serves a policy, and replaces it by one that knows nothing."""

    scratch: Path
    url: str | None = None
    starts: int = 0
    asked: list[str] = field(default_factory=list)
    falls_at: str | None = None
    """The first call of this kind is its last."""
    _replacing: asyncio.Task[None] | None = None
    _running: tuple[RelayServer, LearnerHost] | None = None

    async def find(self) -> str | None:
        return self.url

    async def start(self) -> None:
        folder = self.scratch / str(self.starts)
        folder.mkdir(parents=True)
        policy = LearnerHost(folder)
        server = RelayServer({kind: self._noted(kind, handler) for kind, handler in policy.handlers.items()}, TOKEN)
        listener = socket.create_server(("127.0.0.1", 0))
        await server.start(listener)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.starts += 1
        self._running = server, policy

    def _noted(self, kind: str, handler: Handler) -> Handler:
        async def note(body: Json) -> Json:
            self.asked.append(kind)
            if kind == self.falls_at:
                self.falls_at = None
                self._replacing = asyncio.create_task(self.replace())
            return await handler(body)

        return note

    async def stop(self) -> None:
        if self._running:
            server, policy = self._running
            self._running = None
            await server.close()
            await policy.close()

    async def replace(self) -> None:
        await self.stop()
        await self.start()


@asynccontextmanager
async def hosted(tmp_path: Path, run: RunDir) -> AsyncGenerator[tuple[Host, RemoteLearner]]:
    host = Host(tmp_path)
    await host.start()
    try:
        async with open_remote_learner(run, host.find, TOKEN, model=str(tiny_model_dir()), patience_s=60) as learner:
            yield host, learner
    finally:
        await host.stop()


def new_run(path: Path) -> RunDir:
    return RunDir.create(path, config_of(path))


def record(run: RunDir, step: int) -> tuple[Group, ...]:
    """As a pool does before the policy learns from them, in any order."""
    groups = groups_of(step)
    for index, group in enumerate(groups):
        for rollout in reversed(group.rollouts):
            run.write_rollout(step_phase(step), rollout, group=index)
    return groups


async def trained_here(path: Path) -> bytes:
    with new_run(path) as run:
        learner = await load_learner(run, tiny_model_dir(), print, engine=None)
        for step in range(STEPS):
            await learner.update(groups_of(step))
        await learner.publish()
    return (run.paths.adapter(STEPS) / "adapter_model.safetensors").read_bytes()


def ask() -> GenerateRequest:
    prompt = np.array([5, 6, 7, 8], np.int32)
    return GenerateRequest(prompt_ids=prompt, max_new_tokens=6, temperature=1.0, stop_ids=frozenset(), seed=1)


MOMENTS = ("never", "before a step", "after an update", "after it was saved", "while it is read", "while it learns")


@pytest.mark.parametrize("moment", MOMENTS)
async def test_whenever_its_server_is_replaced_it_learns_the_same(tmp_path: Path, moment: str):
    with new_run(tmp_path / "run") as run:
        async with hosted(tmp_path, run) as (host, learner):
            host.falls_at = {"while it is read": "read", "while it learns": "update"}.get(moment)
            for step in range(STEPS):
                if moment == "before a step":
                    await host.replace()
                groups = record(run, step)
                metrics = await learner.update(groups)
                assert metrics["train/tokens"] > 0
                if moment == "after an update":
                    await host.replace()
                await learner.publish()
                await learner.checkpoint()
                if moment == "after it was saved":
                    await host.replace()
                drawn = await learner.engine.generate(ask())
                assert isinstance(drawn, Generation)
                assert drawn.versions.tolist() == [step + 1] * 6
        assert learner.version == STEPS
        assert host.falls_at is None
        assert host.starts == {"never": 1, "while it is read": 2, "while it learns": 2}.get(moment, STEPS + 1)
        saved = (run.paths.adapter(STEPS) / "adapter_model.safetensors").read_bytes()
        assert [folder.name for folder in sorted((run.path / "checkpoints").iterdir())] == ["step-00002", "step-00004"]
    assert saved == await trained_here(tmp_path / "here")


async def test_a_resumed_run_goes_on_from_its_checkpoint_and_says_so_to_a_new_policy(tmp_path: Path):
    with new_run(tmp_path / "run") as run:
        async with hosted(tmp_path / "first", run) as (_, learner):
            for step in range(2):
                await learner.update(record(run, step))
            await learner.checkpoint()
            await learner.update(record(run, 2))  # and the caller dies
        async with hosted(tmp_path / "second", run) as (host, learner):
            assert learner.version == learner.engine.version == 2
            assert "write" in host.asked
            for step in (2, 3):
                await learner.update(recorded_groups(run, step) or record(run, step))
            await learner.checkpoint()
        saved = (run.paths.adapter(STEPS) / "adapter_model.safetensors").read_bytes()
    assert saved == await trained_here(tmp_path / "here")


async def test_a_run_that_died_right_after_it_was_saved_has_its_adapter_when_it_is_resumed(tmp_path: Path):
    with new_run(tmp_path / "run") as run:
        async with hosted(tmp_path / "first", run) as (_, learner):
            for step in range(STEPS):
                await learner.update(record(run, step))
            await learner.checkpoint()
        file = run.paths.adapter(STEPS) / "adapter_model.safetensors"
        saved = file.read_bytes()
        shutil.rmtree(run.paths.adapter(STEPS))
        async with hosted(tmp_path / "second", run) as (_, learner):
            await learner.publish()
        assert file.read_bytes() == saved


async def update_here(path: Path, group: Group) -> dict[str, float]:
    with new_run(path) as run:
        learner = await load_learner(run, tiny_model_dir(), print, engine=None)
        return await learner.update((group,))


async def test_rewards_that_were_shaped_here_are_what_it_learns_from_there(tmp_path: Path):
    verified = make_group([1.0, 0.0, 1.0, None])
    rewards = (0.25, 0.0, 0.75, None)
    pairs = list(zip(verified.rollouts, rewards, strict=True))
    shaped = replace(verified, rollouts=tuple(replace(rollout, shaped_reward=value) for rollout, value in pairs))
    plain = replace(verified, rollouts=tuple(replace(rollout, reward=value) for rollout, value in pairs))
    with new_run(tmp_path / "run") as run:
        async with hosted(tmp_path, run) as (_, learner):
            found = await learner.update((shaped,))
    assert found == await update_here(tmp_path / "plain", plain)
    assert found != await update_here(tmp_path / "verified", verified)


async def test_an_update_that_is_out_of_turn_is_refused(tmp_path: Path):
    with new_run(tmp_path / "run") as run:
        async with hosted(tmp_path, run) as (_, learner):
            body = {"step": 1, "groups": []}
            with pytest.raises(EngineError, match="update 1 was sent to a policy that has made 0"):
                await learner.relay.call("update", body)


async def test_a_model_that_cannot_be_loaded_there_ends_the_run_with_its_reason(tmp_path: Path):
    with new_run(tmp_path / "run") as run:
        host = Host(tmp_path)
        await host.start()
        with pytest.raises(EngineError, match="`/nowhere` is not a model folder"):
            async with open_remote_learner(run, host.find, TOKEN, model="/nowhere", patience_s=60):
                pass
        await host.stop()


def test_recorded_groups_are_those_that_were_learnt_from(tmp_path: Path):
    with new_run(tmp_path / "run") as run:
        groups = record(run, 1)
        found = recorded_groups(run, 1)
    assert [[rollout.attempt for rollout in group.rollouts] for group in found] == [[0, 1, 2, 3]]
    assert [rollout.reward for rollout in found[0].rollouts] == [rollout.reward for rollout in groups[0].rollouts]
    assert [ids(rollout) for rollout in found[0].rollouts] == [ids(rollout) for rollout in groups[0].rollouts]


def ids(rollout: Rollout) -> list[int]:
    return rollout.segments[0].token_ids.tolist()
