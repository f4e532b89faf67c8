"""LiteLLM's proxy with the production settings of its documentation, one worker, no connections to other machines."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp

from .agents import MODEL, dump
from .servers import Server

VERSION, MASTER_KEY = "1.108.4", "sk-bench"
ROOT = Path(__file__).parents[2]
INSTALL = f"""set -eu
. tools/pip-settings.sh
borrow_pip_settings
uv=$(sh tools/find-uv.sh)
$uv venv --quiet --clear --python "$1" "$2"
echo 'certifi>=2025.1.1' >"$2/overrides.txt" # LiteLLM asks for a newer one than some registries carry
$uv pip install --quiet --compile-bytecode --python "$2" --override "$2/overrides.txt" 'litellm[proxy]=={VERSION}'
"""
SETTINGS = {
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DISABLE_ADMIN_UI": "True",
}


@asynccontextmanager
async def litellm_proxy(upstream: str) -> AsyncGenerator[Server]:
    with TemporaryDirectory() as scratch:
        port, config = _free_port(), Path(scratch, "config.yaml")
        config.write_bytes(dump(_config(upstream)))  # JSON is YAML
        options = ["--config", config, "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        process = subprocess.Popen(
            [_command(), *options, "--telemetry", "False"],
            env=os.environ | SETTINGS | {"HOME": scratch},
            cwd=scratch,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            await _alive(f"http://127.0.0.1:{port}/health/liveliness", process)
            yield Server(f"LiteLLM proxy {VERSION}", f"http://127.0.0.1:{port}/v1", process.pid, key=MASTER_KEY)
        finally:
            process.terminate()
            process.wait()


def _command() -> Path:
    """Return LiteLLM's command, in its own environment, installed on first use."""
    venv = ROOT / ".cache" / "bench" / f"litellm-{VERSION}"
    if not (venv / "bin" / "litellm").exists():
        print(f"installing LiteLLM {VERSION} into {venv.relative_to(ROOT)} ...", file=sys.stderr)
        subprocess.run(["sh", "-c", INSTALL, "sh", sys.executable, venv], check=True, cwd=ROOT)
    return venv / "bin" / "litellm"


def _config(upstream: str) -> dict[str, object]:
    model = {"model": f"openai/{MODEL}", "api_base": upstream, "api_key": "none"}
    return {
        "model_list": [{"model_name": MODEL, "litellm_params": model}],
        "general_settings": {"master_key": MASTER_KEY},
        "litellm_settings": {"request_timeout": 600, "set_verbose": False, "json_logs": True},
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def _alive(url: str, process: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as client:
        while process.poll() is None:
            try:
                async with client.get(url) as response:
                    if response.ok:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise SystemExit(f"the LiteLLM proxy ended with {process.returncode} before it served")
