"""The apps for Modal as a user without an account meets them, and their functions under Modal's stand-in."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import write_model
from server_fakes import write_adapter
from trials import write_task

from dockyard.backends.modal.whole_run import train_in

ROOT = Path(__file__).parents[2]
TRAINER, SERVER = ROOT / "examples/harbor/harbor_grpo_modal.py", ROOT / "examples/harbor/modal_openai_server.py"
STAND_IN = ROOT / "tests/support/modal_stand_in.py"
BIN = Path(sys.executable).parent
PASSES = "echo 1 > /logs/verifier/reward.txt"
PATIENCE_S = 1200  # only against hanging


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    everything = os.environ | environment
    return subprocess.run(words, env=everything, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, TRAINER, "--test"],
        [BIN / "modal", "run", TRAINER, "--test"],
        [sys.executable, SERVER, "--model", "m"],
    ],
)
def test_without_a_token_the_command_that_gets_one_is_named(command: list[object], tmp_path: Path):
    config = str(tmp_path / "modal.toml")
    nowhere = {"HOME": str(tmp_path), "MODAL_CONFIG_PATH": config, "MODAL_TOKEN_ID": "", "MODAL_TOKEN_SECRET": ""}
    done = run(*command, **nowhere, PATH=f"{BIN}:{os.environ['PATH']}")
    assert done.returncode == 1, done.stderr
    assert "modal token new" in done.stderr


def test_arguments_that_mean_nothing_are_refused_before_modal_is_asked():
    done = run(sys.executable, TRAINER, "--test", "--skip-training", MODAL_TOKEN_ID="", MODAL_TOKEN_SECRET="")
    assert done.returncode == 2, done.stderr
    assert "`--skip-training` needs no trainer on Modal" in done.stderr


def test_a_whole_run_is_made_there_and_goes_on_under_its_name(tmp_path: Path):
    for name in ("tasks", "heldout"):
        write_task(tmp_path / name / "one", PASSES, **{"solution__solve.sh": "true"})
    volume = tmp_path / "volume"
    environment = {
        "MODAL_STAND_IN": str(tmp_path),
        "DOCKYARD_MODAL_MOUNT": str(volume),
        "PYTHONPATH": str(ROOT / "tests" / "support"),
    }
    words = ["--agent=oracle", "--num-rollouts=1", "--n-samples=2", f"--dataset={tmp_path / 'tasks'}"]
    start = [sys.executable, STAND_IN, "run", TRAINER, "--env=modal", "--secrets=keys, more"]
    more = ["--environment.type=sandbox", f"--tasks.heldout={tmp_path / 'heldout'}"]
    done = run(*start, *words, *more, **environment)
    assert done.returncode == 0, done.stderr
    folder = next((volume / "runs").iterdir())
    assert f"modal volume get dockyard runs/{folder.name} runs/" in done.stderr
    assert json.loads((folder / "summary.json").read_text())["rollouts"] == 2
    tasks = tomllib.loads((folder / "config.toml").read_text())["tasks"]
    assert all(Path(tasks[name]).is_relative_to(volume / "sent") for name in ("train", "heldout"))
    again = run(*start, "--resume", folder.name, "--rollout.concurrency=3", **environment)
    assert again.returncode == 0, again.stderr
    assert tomllib.loads((folder / "config.toml").read_text())["rollout"]["concurrency"] == 3


@dataclass(frozen=True)
class Tunnel:
    url: str


@contextmanager
def forward(port: int):
    yield Tunnel(f"https://tunnel.example:{port}")


@pytest.mark.parametrize(("agent", "told"), [("qwen-coder", True), ("terminus-2", False)])
def test_agents_in_other_sandboxes_are_told_the_tunnel(
    agent: str, told: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    words = ["--tasks.source=demo", "--environment.type=modal", f"--agent.name={agent}", "--dry-run"]
    assert train_in(tmp_path / "runs" / "new", words, forward, resume=False) == 0
    assert ("https://tunnel.example:" in capfd.readouterr().out) is told


def test_a_run_that_is_not_there_is_not_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert train_in(tmp_path / "runs" / "none", [], forward, resume=True) == 2
    assert "holds no run" in capfd.readouterr().err


def test_rollouts_that_modal_begins_again_are_resumed_as_what_they_were(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    write_task(tmp_path / "tasks" / "one", PASSES, **{"solution__solve.sh": "true"})
    words = ["--skip-training", f"--tasks.train={tmp_path / 'tasks'}", "--agent.name=oracle", "--grpo.group_size=2"]
    for _ in range(2):
        assert train_in(tmp_path / "runs" / "new", words, forward, resume=False) == 0, capfd.readouterr().err
    lines = (tmp_path / "runs/new/rollouts/rollouts.jsonl").read_text().splitlines()
    assert len(lines) == 2


def test_a_run_that_was_killed_raises_so_that_modal_begins_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sitecustomize.py").write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="ended by signal 9"):
        train_in(tmp_path / "runs" / "new", ["--tasks.source=demo"], forward, resume=False)


FAKE_VLLM = """#!{python}
import asyncio, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from server_fakes import FakeVLLM

async def main():
    words = sys.argv
    assert "--enable-lora" in words and words[1] == "serve"
    server = FakeVLLM(port=int(words[words.index("--port") + 1]), tokenizer=Path(words[2]) / "tokenizer.json")
    await server.start()
    while not server.adapters:
        await asyncio.sleep(0.01)
    Path({loaded!r}).write_text(" ".join(server.adapters))
    await asyncio.Event().wait()

asyncio.run(main())
"""


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.load(response)


def test_the_server_speaks_its_dialects_with_the_adapter_that_it_was_deployed_with(tmp_path: Path):
    model, commands, loaded = write_model(_made(tmp_path / "model")), _made(tmp_path / "bin"), tmp_path / "loaded"
    (model / "config.json").write_text("{}")
    write_adapter(tmp_path / "volume/runs/x/adapters/v00001", 0.5)
    vllm = commands / "vllm"
    vllm.write_text(FAKE_VLLM.format(python=sys.executable, tests=str(ROOT / "tests" / "support"), loaded=str(loaded)))
    vllm.chmod(0o755)
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server's: it may listen where this only stands
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "MODAL_STAND_IN": str(tmp_path),
        "DOCKYARD_MODAL_MOUNT": str(tmp_path / "volume"),
        "DOCKYARD_MODAL_MODEL": str(model),
        "DOCKYARD_MODAL_ADAPTER": "runs/x/adapters/v00001",
        "DOCKYARD_MODAL_PORT": str(port),
        "DOCKYARD_API_KEY": "secret",
    }
    command = [sys.executable, str(STAND_IN), "serve", str(SERVER)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait(process, port, tmp_path / "log")
        root = f"http://127.0.0.1:{port}"
        ask = {"model": model.name, "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        assert post(f"{root}/v1/chat/completions", "secret", ask)["usage"]["completion_tokens"] > 0
        assert post(f"{root}/v1/messages", "secret", ask)["type"] == "message"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(f"{root}/v1/chat/completions", "guess", ask)
        while not (loaded.exists() and loaded.read_text()):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        assert "-v0" in loaded.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        held.close()


def test_a_server_without_a_key_says_how_to_give_it_one(tmp_path: Path):
    environment = {"MODAL_STAND_IN": str(tmp_path), "DOCKYARD_MODAL_MODEL": "m", "DOCKYARD_API_KEY": ""}
    done = run(sys.executable, STAND_IN, "serve", SERVER, **environment)
    assert done.returncode == 1
    assert "`DOCKYARD_API_KEY` is not set" in done.stderr


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
