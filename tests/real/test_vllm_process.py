"""A server that a run starts for itself: what it is started with, when it is ready, and that it ends with the run."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from processes import Process, descendants, wait_until_gone, words_of
from server_fakes import WANTED, write_adapter

from dockyard.config import EngineConfig, ModelConfig, RunConfig
from dockyard.engine.open import connect
from dockyard.engine.remote_engine import RemoteEngine
from dockyard.engine.vllm_process import options, reserved_port, serving, summary
from dockyard.errors import DockyardError, EngineError
from dockyard.run_dir.run import Purpose, RunDir

SCRIPT = Path(__file__).parents[1] / "support" / "fake_vllm_command.py"
GPU = ModelConfig()


def engine(folder: Path, *kind: str, **more: Any) -> EngineConfig:
    command = (sys.executable, str(SCRIPT), str(folder), *kind, "serve")
    return EngineConfig(type="vllm", launch=True, command=command, **more)


def test_vllm_is_started_with_what_training_needs():
    settings = EngineConfig(type="vllm", launch=True, memory_share=0.3, context_length=2048)
    words = " ".join(options(settings, GPU, WANTED, port=99))
    assert "--host 127.0.0.1 --port 99 --served-model-name toy/model --dtype bfloat16" in words
    assert "--gpu-memory-utilization 0.3 --logprobs-mode processed_logprobs" in words
    assert "--enable-lora --max-lora-rank 16 --max-loras 1 --max-cpu-loras 2 --max-model-len 2048" in words
    cpu = options(settings, ModelConfig(device="cpu"), WANTED, port=99)
    assert cpu[cpu.index("--dtype") + 1] == "float32"


async def test_a_server_is_asked_once_it_answers_takes_adapters_and_is_gone_after_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VLLM_API_KEY", "of-another-server")
    settings = engine(tmp_path, args=("--dtype", "float32"))
    async with serving(settings, GPU, tmp_path, WANTED, tmp_path / "log") as found:
        started = fakes(tmp_path)
        sampled_from = await connect(found, WANTED)
        assert isinstance(sampled_from, RemoteEngine)
        await sampled_from.publish(write_adapter(tmp_path / "adapter", 0.5), 1)
        await sampled_from.close()
        assert json.loads((tmp_path / "options.json").read_text())[-3:] == ["--enable-scale-out", "--dtype", "float32"]
    assert len(started) == 2  # the supervisor and the server
    wait_until_gone(started)


def fakes(folder: Path) -> set[Process]:
    """The processes of this test's server, among all that the tests have started."""
    return {process for process in descendants(os.getpid()) if {str(SCRIPT), str(folder)} <= words_of(process)}


async def test_an_older_vllm_is_started_without_the_option_it_does_not_know(tmp_path: Path):
    async with (
        serving(engine(tmp_path, "old"), GPU, tmp_path, WANTED, tmp_path / "log") as found,
        aiohttp.ClientSession() as http,
        http.get(f"{found.url}/v1/models") as response,
    ):
        assert response.status == 200
    assert "--enable-scale-out" not in json.loads((tmp_path / "options.json").read_text())


async def test_a_server_that_does_not_start_says_why_and_what_to_change(tmp_path: Path):
    with pytest.raises(DockyardError, match="less than desired GPU memory utilization") as caught:
        async with serving(engine(tmp_path, "broken"), GPU, tmp_path, WANTED, tmp_path / "log"):
            pass
    assert caught.value.hint.startswith(f"its log is `{tmp_path / 'log'}`; `--engine.memory_share` is its part")


async def test_a_program_that_is_not_installed_is_named(tmp_path: Path):
    settings = EngineConfig(type="vllm", launch=True, command=("no-such-vllm", "serve"))
    with pytest.raises(DockyardError, match="`no-such-vllm`, the first word of `engine.command`, is not installed"):
        async with serving(settings, GPU, tmp_path, WANTED, tmp_path / "log"):
            pass


@pytest.mark.parametrize("verb", ["train", "eval", None])
async def test_a_run_ends_when_its_server_does_and_says_why_and_how_it_goes_on(
    tmp_path: Path, verb: Literal["train", "eval"] | None
):
    log = tmp_path / "log"
    if verb:
        with RunDir.create(tmp_path / "run", RunConfig(), purpose=Purpose(verb=verb)) as folder:
            log = folder.paths.engine_log

    async def run() -> None:
        async with serving(engine(tmp_path), GPU, tmp_path, WANTED, log):
            kill_server(tmp_path)
            async with asyncio.timeout(600):  # only against hanging
                await asyncio.Event().wait()

    with pytest.raises(EngineError, match="vLLM ended with code 137 in the middle of the run") as caught:
        await run()
    way_on = f"; `dockyard {verb} --resume {tmp_path / 'run'}` starts both again" if verb else ""
    assert caught.value.hint == f"its log is `{log}`{way_on}"
    current = asyncio.current_task()
    assert current
    assert not current.cancelling()  # what comes after the run is not given up too


async def test_a_failure_of_the_run_itself_is_not_taken_for_the_servers_end(tmp_path: Path):
    with pytest.raises(TimeoutError):
        async with (
            serving(engine(tmp_path), GPU, tmp_path, WANTED, tmp_path / "log"),
            asyncio.timeout(0.1),
        ):
            await asyncio.Event().wait()


async def test_an_interrupt_of_the_run_stays_one(tmp_path: Path):
    async def run() -> None:
        async with serving(engine(tmp_path), GPU, tmp_path, WANTED, tmp_path / "log"):
            ready.set()
            await asyncio.Event().wait()

    ready = asyncio.Event()
    task = asyncio.create_task(run())
    async with asyncio.timeout(600):
        await ready.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def kill_server(folder: Path) -> None:
    [server] = [process for process in fakes(folder) if "-I" not in words_of(process)]  # the supervisor's option
    os.kill(server.pid, signal.SIGKILL)


RUN = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from server_fakes import WANTED
from dockyard.config import EngineConfig, ModelConfig
from dockyard.engine.vllm_process import serving
from dockyard.process import run

async def main():
    settings = EngineConfig(type="vllm", launch=True, command={command!r})
    async with serving(settings, ModelConfig(), Path({folder!r}), WANTED, Path({folder!r}, "log")):
        print("ready", flush=True)
        await asyncio.sleep(600)

run(main())
"""


def started_run(folder: Path, *kind: str) -> subprocess.Popen[bytes]:
    code = RUN.format(tests=str(SCRIPT.parent), command=engine(folder, *kind).command, folder=str(folder))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def test_a_server_ends_when_the_run_is_killed(tmp_path: Path):
    with started_run(tmp_path) as run:
        assert run.stdout
        assert run.stdout.readline() == b"ready\n"
        started = descendants(run.pid)
        run.kill()
    assert len(started) == 2  # the supervisor and the server
    wait_until_gone(started)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_does_not_answer_yet_ends_with_the_run(tmp_path: Path, number: int):
    with started_run(tmp_path, "loading") as run:
        while not (tmp_path / "options.json").exists():
            assert run.poll() is None
            time.sleep(0.05)
        started = descendants(run.pid)
        run.send_signal(number)
    assert len(started) == 2
    wait_until_gone(started)


def test_a_reserved_port_can_be_listened_at_by_vllm_and_is_nobody_elses():
    with reserved_port() as port, socket.socket() as vllm, socket.socket() as other:
        vllm.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM's
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        vllm.bind(("127.0.0.1", port))
        vllm.listen()


def test_a_log_without_errors_is_summed_up_by_its_end():
    assert summary("one\n\ntwo\n") == "one\ntwo"
    assert summary("KeyError: a\nKeyError: a\nWARNING `OSError: many`\nraise KeyError\nlast\n") == "KeyError: a"
    assert summary("") == "it printed nothing"
