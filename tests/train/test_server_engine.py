"""A run decides how it works before it loads any weights, and opens the server that its settings name."""

from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import pytest
from server_fakes import FakeHosted, FakeVLLM, write_adapter
from tiny_policy import tiny_model_dir

from dockyard.collect.task_sets import TaskSets
from dockyard.config import EngineConfig, RunConfig, TasksConfig
from dockyard.engine.open import open_engine
from dockyard.engine.remote_engine import RemoteEngine
from dockyard.errors import DockyardError
from dockyard.gateway.render.renderer import Renderer
from dockyard.run_dir.run import RunDir
from dockyard.trainer.loop import Learner
from dockyard.trainer.modes import (
    EmbeddedMode,
    RecordedMode,
    RemoteMode,
    RunInputs,
    ServedMode,
    TextMode,
    choose_mode,
)

VLLM = EngineConfig(type="vllm", url="http://127.0.0.1:1")


def config_for(kind: str, url: str) -> RunConfig:
    return RunConfig(engine=EngineConfig.model_validate({"type": kind, "url": url}))


@contextmanager
def inputs_of(folder: Path, config: RunConfig) -> Generator[RunInputs]:
    renderer = Renderer.load(tiny_model_dir(), "tiny")
    tasks = TaskSets(train=[], heldout=[])
    with RunDir.create(folder / "run", config) as run:
        yield RunInputs(run=run, tasks=tasks, recorded=(), model_dir=tiny_model_dir(), renderer=renderer)


def nowhere(run: RunDir) -> AbstractAsyncContextManager[Learner]:
    raise AssertionError("deciding opens nothing")


@pytest.mark.parametrize(
    ("engine", "recorded", "heldout", "remote", "mode"),
    [
        (EngineConfig(), False, True, False, EmbeddedMode()),
        (VLLM, False, False, False, ServedMode(VLLM)),
        (EngineConfig(), False, False, True, RemoteMode(nowhere)),
        (VLLM, False, False, True, RemoteMode(nowhere)),
        (EngineConfig(), True, False, False, RecordedMode(heldout=None)),
        (EngineConfig(type="openai", url="http://127.0.0.1:1"), True, False, False, RecordedMode(heldout=None)),
        (EngineConfig(), True, False, True, RecordedMode(heldout=None, open_learner=nowhere)),
        (EngineConfig(), True, True, False, RecordedMode(heldout=EmbeddedMode())),
        (VLLM, True, True, False, RecordedMode(heldout=ServedMode(VLLM))),
        (EngineConfig(), True, True, True, RecordedMode(heldout=RemoteMode(nowhere))),
    ],
)
async def test_the_mode_follows_from_engine_rollouts_and_learner(
    engine: EngineConfig, recorded: bool, heldout: bool, remote: bool, mode: object
):
    tasks = {"source": "recorded", "dataset": "job"} if recorded else {}
    tasks |= {"heldout": "tasks"} if heldout else {}
    config = RunConfig(engine=engine, tasks=TasksConfig.model_validate(tasks))
    assert await choose_mode(config, nowhere if remote else None) == mode


async def test_an_endpoint_without_token_ids_is_one_for_text():
    server = FakeHosted(models=("gpt",), max_model_len=None)
    await server.start()
    config = config_for("openai", server.url)
    assert await choose_mode(config) == TextMode(config.engine, "gpt")
    await server.stop()


async def test_an_openai_endpoint_that_tells_token_ids_is_trained_with_as_vllm(tmp_path: Path):
    server = FakeVLLM()
    server.tokenizer = tiny_model_dir() / "tokenizer.json"
    await server.start()
    with inputs_of(tmp_path, config_for("openai", f"{server.url}/v1")) as inputs:
        mode = await choose_mode(inputs.run.config)
        assert isinstance(mode, ServedMode)
        async with open_engine(mode.spec(inputs)) as engine:
            assert isinstance(engine, RemoteEngine)
            await engine.publish(write_adapter(tmp_path / "adapter", 0.5), 1)
            assert engine.version == 1
    await server.stop()


async def test_the_ids_of_the_runs_own_tokenizer_are_compared_with_the_servers(tmp_path: Path):
    server = FakeVLLM()  # its tokens are bytes
    await server.start()
    with inputs_of(tmp_path, config_for("vllm", server.url)) as inputs:
        spec = ServedMode(inputs.run.config.engine).spec(inputs)
        with pytest.raises(DockyardError, match="another tokenizer than `Qwen/Qwen2.5-Coder-7B-Instruct`"):
            async with open_engine(spec):
                pass
        server.tokenizer = tiny_model_dir() / "tokenizer.json"
        async with open_engine(spec) as engine:
            assert isinstance(engine, RemoteEngine)
    await server.stop()
