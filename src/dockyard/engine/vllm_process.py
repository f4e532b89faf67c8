"""A vLLM server that a run starts on the machine and GPU of the trainer. It ends with the run, however that ends.

It must be ready before the trainer allocates memory: vLLM measures the free memory while it starts.
"""

import asyncio
import logging
import os
import re
import shlex
import shutil
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from dockyard import supervise
from dockyard.config import EngineConfig, ModelConfig
from dockyard.engine.checks import ServerRequirements
from dockyard.engine.http import ModelServer
from dockyard.engine.vllm import max_rank
from dockyard.errors import EngineError
from dockyard.process import ends_with
from dockyard.run_dir.durable import disk_errors
from dockyard.run_dir.run import read_purpose

logger = logging.getLogger(__name__)

_SCALE_OUT = "--enable-scale-out"  # enables the generate route since vLLM 0.30; earlier versions reject it
_START_S = 1800.0  # only in case it hangs: a server that fails exits, and large models take long to load
_PATIENCE_S = 30.0
_PAUSE_S = 0.5
_SHOWN_LINES = 6
_ERROR = re.compile(r"\b(\w*Error|error):")


@asynccontextmanager
async def serving(
    engine: EngineConfig, model: ModelConfig, model_dir: Path, required: ServerRequirements, log: Path
) -> AsyncGenerator[EngineConfig]:
    """Start a vLLM server for this block if `engine.launch` is set, and yield the settings with its address.

    `log` receives its output.
    """
    if not engine.launch:
        yield engine
        return
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}"
        words = [*engine.command, str(model_dir), *options(engine, model, required, port)]
        process = await _start(words, engine.args, url, log)
    try:
        async with ends_with(process, lambda: _ended(process, log)):
            yield engine.model_copy(update={"url": url})
    finally:
        await _end(process)


def options(engine: EngineConfig, model: ModelConfig, required: ServerRequirements, port: int) -> list[str]:
    """The options of vLLM that training needs."""
    dtype = model.dtype if model.dtype != "auto" else "float32" if model.device == "cpu" else "bfloat16"
    length = ["--max-model-len", str(engine.context_length)] if engine.context_length else []
    # Rollouts of all versions share a batch. A new version is loaded before the oldest is unloaded.
    adapters = ["--max-loras", str(required.num_versions), "--max-cpu-loras", str(required.num_versions + 1)]
    return [
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", required.model, "--dtype", dtype),
        *("--gpu-memory-utilization", str(engine.memory_share), "--logprobs-mode", "processed_logprobs"),
        *("--enable-lora", "--max-lora-rank", str(max_rank(required.lora_rank)), *adapters, *length),
    ]


async def _start(words: Sequence[str], args: Sequence[str], url: str, log: Path) -> Process:
    """Start the server and wait until it answers."""
    if shutil.which(words[0]) is None:
        hint = "`pip install vllm`, or name its program: `--engine.command '[\"python\", ...]'`"
        raise EngineError(f"`{words[0]}`, the first word of `engine.command`, is not installed", hint=hint)
    command = [*words, _SCALE_OUT, *args]
    logger.info("starting vLLM, which takes a minute or more; its log: %s", log)
    process = await _ready(command, url, log)
    if process is None and f"unrecognized arguments: {_SCALE_OUT}" in _text(log):
        command.remove(_SCALE_OUT)
        process = await _ready(command, url, log)
    if process is None:
        said = _text(log)
        raise EngineError(f"vLLM did not start:\n{summary(said)}", hint=f"its log is `{log}`; {_hint(said, command)}")
    return process


async def _ready(command: Sequence[str], url: str, log: Path) -> Process | None:
    """The process once it answers; None if it has ended or takes too long."""
    with disk_errors(log):
        output = log.open("wb")
    with output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", supervise.__file__, str(_PATIENCE_S), *command),
            stdin=asyncio.subprocess.PIPE,  # `supervise` ends the server when it closes, also if we die
            stdout=output,
            stderr=output,
            env=_environment(),
            start_new_session=True,
        )
    try:
        if await _answers(process, url):
            return process
    except BaseException:
        await _end(process)
        raise
    await _end(process)
    return None


def _environment() -> dict[str, str]:
    """The environment without `VLLM_API_KEY`, with which the server would reject our calls."""
    ours = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    return ours | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


async def _answers(process: Process, url: str) -> bool:
    """Wait for any answer. Later checks report what is wrong with the server."""
    deadline = time.monotonic() + _START_S
    server = ModelServer(url)
    try:
        while process.returncode is None and time.monotonic() < deadline:
            try:
                await server.get("/v1/models", patient=False)
                return True
            except EngineError as error:  # it is not listening yet
                logger.debug("%s", error)
            await asyncio.sleep(_PAUSE_S)
        return False
    finally:
        await server.close()


def _ended(process: Process, log: Path) -> EngineError:
    return EngineError(
        f"vLLM ended with code {process.returncode} in the middle of the run:\n{summary(_text(log))}",
        hint=f"its log is `{log}`{_way_on(log.parent)}",
    )


def _way_on(folder: Path) -> str:
    purpose = read_purpose(folder)  # None if the folder is not that of a run
    return f"; `dockyard {purpose.verb} --resume {folder}` starts both again" if purpose else ""


async def _end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


def summary(text: str) -> str:
    """The last lines of a log that mention errors, or simply the last lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = list(dict.fromkeys(line for line in lines if "WARNING" not in line and _ERROR.search(line)))
    return "\n".join((errors or lines)[-_SHOWN_LINES:]) or "it printed nothing"


def _hint(text: str, command: Sequence[str]) -> str:
    memory = ("memory utilization", "out of memory", "No available memory", "KV cache")
    if any(sign in text for sign in memory):
        return "`--engine.memory_share` is its part of the GPU: raise it, or lower it when another program holds memory"
    return f"`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True {shlex.join(command)}` starts it alone"


def _text(log: Path) -> str:
    return log.read_text(errors="replace")


@contextmanager
def reserved_port() -> Generator[int]:
    """A free port that no other program gets while vLLM starts: the socket is shared until vLLM listens."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
