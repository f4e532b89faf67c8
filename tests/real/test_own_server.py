"""A server that a run starts for itself: what it is started with, when it is ready, and that it ends with the run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_fakes import until
from processes import descendants, wait_until_gone
from server_fakes import WANTED, write_adapter

from dockyard.config import EngineConfig, ModelConfig
from dockyard.engine.connect import connect
from dockyard.engine.own_server import options, serving, summary
from dockyard.engine.remote import RemoteEngine
from dockyard.errors import DockyardError

SCRIPT = Path(__file__).parents[1] / "fake_vllm_command.py"
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


async def test_a_server_is_asked_once_it_answers_takes_adapters_and_is_gone_after_the_block(tmp_path: Path):
    settings = engine(tmp_path, args=("--dtype", "float32"))
    async with serving(settings, GPU, tmp_path, WANTED, tmp_path / "log") as found:
        started = descendants(os.getpid())
        sampled_from = await connect(found, WANTED)
        assert isinstance(sampled_from, RemoteEngine)
        await sampled_from.publish(write_adapter(tmp_path / "adapter", 0.5), 1)
        await sampled_from.close()
        assert json.loads((tmp_path / "options.json").read_text())[-3:] == ["--enable-scale-out", "--dtype", "float32"]
    assert started
    wait_until_gone(started)


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
    assert "`--engine.memory_share`" in caught.value.hint


async def test_a_program_that_is_not_installed_is_named(tmp_path: Path):
    settings = EngineConfig(type="vllm", launch=True, command=("no-such-vllm", "serve"))
    with pytest.raises(DockyardError, match="`no-such-vllm`, the first word of `engine.command`, is not installed"):
        async with serving(settings, GPU, tmp_path, WANTED, tmp_path / "log"):
            pass


async def test_the_end_of_a_server_in_the_middle_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async with serving(engine(tmp_path), GPU, tmp_path, WANTED, tmp_path / "log"):
        [server] = [found for found in descendants(os.getpid()) if _is_fake(found.pid)]
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: "vLLM ended with code 137 in the middle of the run" in caplog.text)


def _is_fake(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return words[1] == str(SCRIPT).encode()


RUN = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from server_fakes import WANTED
from dockyard.config import EngineConfig, ModelConfig
from dockyard.engine.own_server import serving

async def main():
    settings = EngineConfig(type="vllm", launch=True, command={command!r})
    async with serving(settings, ModelConfig(), Path({folder!r}), WANTED, Path({folder!r}, "log")):
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_server_ends_when_the_run_is_killed(tmp_path: Path):
    command = engine(tmp_path).command
    code = RUN.format(tests=str(SCRIPT.parent), command=command, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as run:
        assert run.stdout
        assert run.stdout.readline() == b"ready\n"
        started = descendants(run.pid)
        run.kill()
    assert len(started) >= 2  # the warden and the server
    wait_until_gone(started)


def test_a_log_without_errors_is_summed_up_by_its_end():
    assert summary("one\n\ntwo\n") == "one\ntwo"
    assert summary("KeyError: a\nKeyError: a\nWARNING `OSError: many`\nraise KeyError\nlast\n") == "KeyError: a"
    assert summary("") == "it said nothing"
