"""The apps for Modal by Modal's own objects, which need no account until something is run."""

import asyncio
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import modal
import pytest
from trials import write_task

from dockyard.backends.modal import app, launch, server
from dockyard.backends.modal.launch import PolicyCall
from dockyard.backends.modal.whole_run import gateway_settings
from dockyard.errors import DockyardError

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/harbor"))

import harbor_grpo_modal


def test_the_apps_describe_themselves_without_an_account():
    assert all(isinstance(function, modal.Function) for function in (app.serve_policy, app.train_there))
    assert isinstance(server.serve, modal.Function)
    assert (app.app.name, server.app.name) == ("dockyard", "dockyard-server")
    assert "--num-rollouts" in harbor_grpo_modal.parser().format_help()


def test_the_image_has_our_source_and_its_lock_file():
    assert (app.SOURCE / "dockyard" / "__init__.py").is_file()
    assert (app.SOURCE.parent / "uv.lock").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--test", "stray"], "`stray` is no argument"),
        (["--openai-base-url", "http://x"], "`--openai-base-url` has no effect"),
        (["--skip-training"], "`--skip-training` needs no trainer on Modal"),
        (["--resume", "runs/x", "--model", "m"], "`--model` does not go with `--resume`"),
        (["--resume", "runs/x"], "`runs/x` holds no run"),
        (["--env=modal", "--run_dir=runs/x"], "`--run_dir` has no effect"),
        (["--engine.type=vllm", "--engine.url=http://x", "--agent=shell"], "a policy on Modal has its own engine"),
        (["--grpo.loss=my:loss", "--agent=shell"], "`grpo.loss` is `my:loss`, but the policy is trained on another"),
        (
            ["--grpo.advantage=my:f", "--agent=shell"],
            "`grpo.advantage` is `my:f`, but the policy is trained on another",
        ),
        (["--grpo.reward=nowhere:f", "--agent=shell"], "there is no module `nowhere`"),
        (["--env=modal", "--grpo.reward=my:f"], "`grpo.reward` is `my:f`, but the run is on Modal"),
        (["--env=modal", "--grpo.advantage=my:f"], "`grpo.advantage` is `my:f`, but the run is on Modal"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "tasks" / "one", "true")
    more = [] if "--resume" in words else ["--dataset=tasks"]
    assert harbor_grpo_modal.run(["--env=sandbox", *words, *more]) == 2
    assert said in capsys.readouterr().err


class Board(dict[str, Any]):
    """A Modal Dict."""

    def put(self, key: str, value: Any) -> None:
        self[key] = value


class Call:
    """A function call: what asking for its result gives."""

    def __init__(self, result: Exception | None) -> None:
        self.result = result
        self.cancelled = False

    def get(self, timeout: float) -> None:
        if self.result:
            raise self.result

    def cancel(self, terminate_containers: bool) -> None:
        self.cancelled = True
        raise OSError("the network is gone")


class Function:
    """Gives these calls, one after the other."""

    def __init__(self, *calls: Call) -> None:
        self.calls = list(calls)
        self.spawned: list[Call] = []

    def spawn(self, *arguments: Any) -> Call:
        self.spawned.append(self.calls[len(self.spawned)])
        return self.spawned[-1]


def policy_call(function: Any, board: Any) -> PolicyCall:
    return PolicyCall(function, board)


async def test_a_policy_is_looked_for_until_it_says_where_it_is():
    function, board = Function(Call(TimeoutError())), Board()
    call = policy_call(function, board)
    assert await call.find() is None
    board.put("url", "https://there")
    assert await call.find() == "https://there"
    assert len(function.spawned) == 1
    call.end()
    assert function.spawned[0].cancelled


@pytest.mark.parametrize("end", [None, modal.exception.FunctionTimeoutError("24 hours")])
async def test_a_function_that_ended_is_begun_again_and_its_old_address_forgotten(end: Exception | None):
    function, board = Function(Call(end), Call(TimeoutError())), Board()
    call = policy_call(function, board)
    await call.find()
    board.put("url", "https://old")
    assert await call.find() is None
    assert len(function.spawned) == 2


@pytest.mark.parametrize(
    "drop", [modal.exception.ConnectionError("x"), OSError("x"), modal.exception.ServiceError("x")]
)
async def test_while_modal_does_not_answer_the_policy_is_where_it_was(drop: Exception):
    first = Call(TimeoutError())
    function, board = Function(first), Board()
    call = policy_call(function, board)
    await call.find()
    board.put("url", "https://there")
    await call.find()
    first.result = drop
    assert await call.find() == "https://there"
    assert len(function.spawned) == 1


async def test_a_function_that_never_gets_to_serve_ends_the_run():
    function = Function(*[Call(RuntimeError("no module")) for _ in range(4)])
    call = policy_call(function, Board())
    for _ in range(3):
        assert await call.find() is None
    with pytest.raises(DockyardError, match="ended 3 times before it was ready: no module"):
        await call.find()


def test_names_that_are_not_here_stay_as_they_are():
    assert launch.uploaded("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


async def test_a_tunnel_leads_to_the_gateway_by_a_port_that_is_open_to_others():
    forwarded: list[int] = []

    @contextmanager
    def forward(port: int) -> Generator[Tunnel]:
        forwarded.append(port)
        yield Tunnel("https://tunnel.example")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"heard " + await reader.readline())
        writer.close()

    with gateway_settings(True, forward) as settings:
        assert settings[1] == "--gateway.public_url=https://tunnel.example"
        async with await asyncio.start_server(answer, "127.0.0.1", int(settings[0].removeprefix("--gateway.port="))):
            reader, writer = await asyncio.open_connection("127.0.0.2", forwarded[0])  # not where a gateway listens
            writer.write(b"a call\n")
            assert await reader.read() == b"heard a call\n"
            writer.close()
            await writer.wait_closed()


@dataclass(frozen=True)
class Tunnel:
    url: str
