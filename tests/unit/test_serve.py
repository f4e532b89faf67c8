"""The stand-alone server: its command line, the session that everybody shares, and how it starts and fails."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from gateway_fakes import CHATML, FakeEngine, Said, tiny_renderer, until, write_model

from dockyard.cli.args import parse
from dockyard.cli.main import load_verb
from dockyard.cli.serve import read_options
from dockyard.collect.open import find_files
from dockyard.errors import DockyardError, UsageError
from dockyard.gateway.protocol import UNSUPPORTED_PARAMETERS
from dockyard.gateway.server import Gateway, Timeouts
from dockyard.gateway.sessions import TokenSessions
from dockyard.gateway.shared_session import SharedSession
from dockyard.serve.options import ServeOptions
from dockyard.serve.server import keep_serving, open_shared_session, serve
from dockyard.types import Message, Prompt

KEY = "the-key"
VLLM = ("--engine", "vllm", "--engine-url", "http://x")


def options(*words: str, model: str = "policy", **environment: str) -> ServeOptions:
    return read_options(parse(load_verb("serve"), [model, *words]), environment)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--engine", "vllm"], "`--engine vllm` needs the URL of a server, and `engine.url` is not set"),
        (["--engine-url", "http://x"], "`--engine-url` has no effect when `engine.type` is `transformers`"),
        ([*VLLM, "--dtype", "float32"], "`--dtype` has no effect when `--engine` is `vllm`: the server decides it"),
        ([*VLLM, "--engine.max_batch=3"], "`engine.max_batch` has no effect when `engine.type` is `vllm`"),
        ([*VLLM, "--engine.launch=true"], "`engine.launch` has no effect when a model is served"),
        (["--engine.memory_share=0.3"], "`engine.memory_share` has no effect when a model is served"),
        (["--engine", "openai", "--engine-url", "localhost"], "`--engine-url` on the command line is `localhost`; it"),
        (["--engine", "vlm"], "`--engine` on the command line is `vlm`; it must be 'transformers', 'vllm'"),
        (
            ["--context-length", "3"],
            "`--context-length` on the command line is `3`; it must be an integer of at least 16",
        ),
        (
            ["--max-new-tokens", "0"],
            "`--max-new-tokens` on the command line is `0`; it must be an integer of at least 1",
        ),
        (["--admin-port=x"], "`--admin-port` on the command line is `x`; it must be an integer between 0 and 65535"),
        (["--tasks.train=x"], "`--tasks.train` is not a setting"),
        (["--no-auth", "--api-key", "x"], "`--no-auth` cannot be combined with `--api-key`"),
        (["--no-auth", "--admin-port", "0"], "`--no-auth` cannot be combined with an admin listener"),
        (["--admin-port", "0", "--admin-socket", "s"], "`--admin-port` cannot be combined with `--admin-socket`"),
        (["--api-key", " "], "`--api-key` is empty"),
    ],
)
def test_a_command_line_that_contradicts_itself_is_refused(words: list[str], error: str):
    with pytest.raises(UsageError) as refused:
        options(*words)
    assert refused.value.message.startswith(error)
    assert refused.value.hint


def test_an_adapter_folder_without_an_adapter_is_refused(tmp_path: Path):
    with pytest.raises(DockyardError, match="has no `adapter_config.json`"):
        options("--adapter", str(tmp_path))


def test_a_key_is_given_or_found_or_made_up_and_only_that_is_printed():
    given, found, made = options("--api-key", "abc"), options(DOCKYARD_API_KEY="xyz"), options()
    assert given.key
    assert found.key
    assert made.key
    assert (given.key.value, given.key.shown) == ("abc", "<--api-key>")
    assert (found.key.value, found.key.shown) == ("xyz", "$DOCKYARD_API_KEY")
    assert len(made.key.value) >= 20
    assert made.key.shown == made.key.value != getattr(options().key, "value", None)


def test_the_key_and_the_admin_token_must_differ():
    with pytest.raises(UsageError, match="are the same"):
        options("--api-key", "x", "--admin-port", "0", DOCKYARD_ADMIN_TOKEN="x")


@pytest.mark.parametrize(
    ("model", "name"),
    [("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("smollm2-135m", "smollm2-135m"), ("/a/b/mine", "mine"), ("./mine", "mine")],
)
def test_a_folder_is_served_under_its_own_name(model: str, name: str):
    assert options(model=model).served_name == name


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["--engine=vllm", "--engine-url=http://x"], ["--engine.type", "vllm", "--engine.url", "http://x"]),
        ([*VLLM, "--engine-model=m"], [*VLLM, "--engine.model=m"]),
        ([*VLLM, "--engine-api-key-env", "K"], [*VLLM, "--engine.api_key_env", "K"]),
        (["--context-length", "99"], ["--engine.context_length=99"]),
        (["--device", "cpu", "--dtype", "float32"], ["--model.device=cpu", "--model.dtype=float32"]),
        (["--max-new-tokens=9", "--admin-port=0"], ["--max_new_tokens=9", "--admin_port", "0"]),
        (["--admin-socket", "s"], ["--admin_socket=s"]),
    ],
)
def test_a_flag_and_the_setting_that_it_stands_for_are_the_same(words: list[str], same: list[str]):
    environment = {"DOCKYARD_API_KEY": "k", "DOCKYARD_ADMIN_TOKEN": "t"}
    assert options(*words, **environment) == options(*same, **environment) != options(**environment)


def test_the_last_of_a_flag_and_its_setting_counts_and_the_model_may_come_anywhere():
    chosen = read_options(parse(load_verb("serve"), ["--no-auth", "--port=1", "here", "--port", "2"]), {})
    assert (chosen.config.model.name, chosen.config.port, chosen.key) == ("here", 2, None)


def test_settings_of_the_embedded_engine_are_served_with():
    assert options("--engine.max_batch", "3", "--engine.deterministic=false").config.engine.max_batch == 3


def test_help_names_every_parameter_that_has_no_effect(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        options("--help")
    shown = capsys.readouterr().out
    assert [name for name in UNSUPPORTED_PARAMETERS if f"{name}" not in shown] == []


@dataclass
class Client:
    """Anybody who asks the server."""

    gateway: Gateway
    shared: SharedSession
    http: aiohttp.ClientSession
    key: str | None = KEY

    async def ask(self, *said: str, route: str = "chat/completions", **fields: Any) -> tuple[int, Any]:
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(said or ("hi",))]
        given = {"input": messages} if route == "responses" else {"messages": messages}
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        url = f"{self.gateway.url}/{route}"
        async with self.http.post(url, json=given | fields, headers=headers) as response:
            return response.status, await response.json()


@asynccontextmanager
async def serving(engine: FakeEngine, *words: str, max_held: int | None = None) -> AsyncIterator[Client]:
    gateway = Gateway(TokenSessions(engine, tiny_renderer()), "policy", timeouts=Timeouts(retry_grace_s=0.01))
    shared = open_shared_session(options(*(words or ("--api-key", KEY))), gateway)
    if max_held is not None:
        shared.max_held = max_held
    await gateway.start()
    async with aiohttp.ClientSession() as http:
        yield Client(gateway, shared, http)
    await gateway.close()


@pytest.mark.parametrize("route", ["chat/completions", "messages", "responses"])
async def test_a_clients_sampling_counts_in_every_dialect(route: str):
    limit = "max_output_tokens" if route == "responses" else "max_tokens"
    async with serving(engine := FakeEngine(), "--api-key", KEY, "--temperature", "0.3") as client:
        await client.ask(route=route, temperature=0.9, seed=11, **{limit: 7})
        await client.ask(route=route, **{limit: 7})
    first, second = engine.requests
    assert (first.temperature, first.seed, first.max_new_tokens) == (0.9, 11, 7)
    assert second.temperature == 0.3
    assert second.seed != 11


async def test_without_a_limit_an_answer_may_fill_the_context():
    async with serving(engine := FakeEngine(context_length=500)) as client:
        await client.ask()
    assert engine.requests[0].max_new_tokens == 500 - len(engine.requests[0].prompt_ids)


async def test_the_servers_limit_on_an_answer_holds():
    async with serving(engine := FakeEngine(), "--api-key", KEY, "--max-new-tokens", "9") as client:
        await client.ask(max_tokens=100)
    assert engine.requests[0].max_new_tokens == 9


@pytest.mark.parametrize("field", [{"temperature": 2.5}, {"temperature": "hot"}, {"seed": 2**63}, {"seed": 1.5}])
async def test_sampling_that_makes_no_sense_is_refused(field: dict[str, Any]):
    async with serving(engine := FakeEngine()) as client:
        status, answer = await client.ask(**field)
    assert (status, engine.requests) == (400, [])
    assert answer["error"]["message"].startswith(f"`{next(iter(field))}`")


async def test_a_temperature_next_to_nothing_is_nothing():
    async with serving(engine := FakeEngine()) as client:
        await client.ask(temperature=1e-30)
    assert engine.requests[0].temperature == 0


async def test_what_has_no_effect_is_said_once_for_each_name(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        async with serving(FakeEngine()) as client:
            assert (await client.ask(top_p=0.5, stop=["x"], top_k=0, frequency_penalty=0))[0] == 200
            assert (await client.ask(top_p=0.7, top_k=40, tool_choice="required"))[0] == 200
    warned = [record.getMessage().split("`")[1] for record in caplog.records if "has no effect" in record.getMessage()]
    assert warned == ["top_p", "stop", "top_k", "tool_choice"]


async def test_a_training_session_of_the_same_server_hears_no_wishes():
    async with serving(engine := FakeEngine()) as client:
        client.key = client.gateway.open_session("r", seed=1, temperature=1.0, max_new_tokens=5).key
        assert (await client.ask(temperature=0, seed=3))[0] == 200
        assert (await client.ask(temperature="hot"))[0] == 200
    assert [request.temperature for request in engine.requests] == [1.0, 1.0]


@pytest.mark.parametrize("key", [None, "", "nonsense"])
async def test_another_key_is_refused(key: str | None):
    async with serving(FakeEngine()) as client:
        client.key = key
        assert (await client.ask())[0] == 401


@pytest.mark.parametrize("key", [None, "nonsense"])
async def test_without_auth_any_key_and_none_will_do(key: str | None):
    async with serving(FakeEngine(), "--no-auth") as client:
        client.key = key
        assert (await client.ask())[0] == 200


async def test_a_second_turn_keeps_the_ids_of_the_first():
    async with serving(FakeEngine([Said("list", pieces=1)])) as client:
        _, first = await client.ask("hi", return_token_ids=True)
        reply = first["choices"][0]
        _, second = await client.ask("hi", reply["message"]["content"], "go on", return_token_ids=True)
    known = first["prompt_token_ids"] + reply["token_ids"]
    assert second["prompt_token_ids"][: len(known)] == known


async def test_conversations_that_begin_differently_are_apart_and_the_oldest_is_forgotten():
    script = [Said("list", pieces=1), *[Said("ok")] * 20]
    async with serving(engine := FakeEngine(script), max_held=200) as client:
        _, first = await client.ask("hi")
        for number in range(12):
            await client.ask(f"{number} other words to begin with")
        assert client.shared.stats["held_tokens"] <= 200
        assert client.shared.stats["forgotten"] > 0
        reply = first["choices"][0]["message"]["content"]
        assert (await client.ask("hi", reply, "go on"))[0] == 200
    before = [*engine.requests[0].prompt_ids.tolist(), *engine.generations[0].token_ids.tolist()]
    assert engine.requests[-1].prompt_ids.tolist()[: len(before)] != before


async def test_a_conversation_in_use_is_not_forgotten():
    script = [Said("list", pieces=1), *[Said("ok")] * 20]
    async with serving(engine := FakeEngine(script), max_held=800) as client:
        _, first = await client.ask("hi")
        history = ["hi", first["choices"][0]["message"]["content"]]
        for number in range(6):
            await client.ask(f"{number} other words to begin with")
            _, answer = await client.ask(*history, "go on")
            history += ["go on", answer["choices"][0]["message"]["content"]]
    before = [*engine.requests[0].prompt_ids.tolist(), *engine.generations[0].token_ids.tolist()]
    assert engine.requests[-1].prompt_ids.tolist()[: len(before)] == before


async def test_one_conversation_alone_cannot_fill_the_memory():
    async with serving(FakeEngine(), max_held=100) as client:
        for number in range(8):
            await client.ask("hi", "well", f"{number} and a few more words that take up space")
        assert client.shared.stats["held_tokens"] <= 100


async def test_a_forgotten_conversation_still_answers_the_call_under_way():
    engine = FakeEngine([Said("ls")], hold=asyncio.Event())
    async with serving(engine, max_held=0) as client:
        slow = asyncio.create_task(client.ask("slow"))
        await until(lambda: len(engine.requests) == 1)
        quick = asyncio.create_task(client.ask("quick"))
        await until(lambda: len(engine.requests) == 2)
        assert engine.hold
        engine.hold.set()
        assert [status for status, _ in await asyncio.gather(slow, quick)] == [200, 200]
        assert client.shared.stats["conversations"] == 0


async def test_a_closed_house_drops_what_is_under_way():
    gateway = Gateway(TokenSessions(engine := FakeEngine(hold=asyncio.Event()), tiny_renderer()), "policy")
    shared = open_shared_session(options("--api-key", KEY), gateway)
    task = shared.submit(Prompt((Message("user", "hi"),)), None)
    await until(lambda: len(engine.requests) == 1)
    recording = shared.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (recording.calls, recording.answered, recording.segments) == (1, 0, ())


def model_folder(folder: Path, template: str | None = CHATML) -> str:
    (folder / "config.json").write_text('{"max_position_embeddings": 512}')
    return str(write_model(folder, template))


def test_a_port_in_use_is_found_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(DockyardError, match=f"cannot listen on `127.0.0.1:{port}`") as refused:
            serve(options("--port", port, model="/nowhere"), print)
    assert "--port 0" in refused.value.hint


def test_an_address_of_another_machine_cannot_be_listened_on():
    with pytest.raises(DockyardError, match="cannot listen on `192.0.2.1:0`") as refused:
        serve(options("--host", "192.0.2.1", "--port", "0", model="/nowhere"), print)
    assert "--port 0" not in refused.value.hint


def test_an_unknown_model_is_refused():
    with pytest.raises(DockyardError, match="`/nowhere` is not a model folder"):
        serve(options("--port", "0", model="/nowhere"), print)


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path):
    with pytest.raises(DockyardError, match="has no chat template"):
        serve(options("--port", "0", model=model_folder(tmp_path, None)), print)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "openai"])
async def test_a_server_that_does_not_answer_is_named(engine: str, tmp_path: Path):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody else gets this port, and nobody listens there
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        chosen = options("--engine", engine, "--engine-url", url, "--port", "0", model=model_folder(tmp_path))
        with pytest.raises(DockyardError, match="does not answer") as refused:
            await keep_serving(chosen, find_files(chosen.config.model, chosen.config.engine), print)
    assert url in refused.value.message


@asynccontextmanager
async def upstream(bodies: list[Any]) -> AsyncIterator[str]:
    """A hosted model: chat, and no token ids."""

    async def chat(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        message = {"role": "assistant", "content": "Hello."}
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "gpt-x"}, {"id": "gpt-y"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def test_a_hosted_model_is_served_in_text_mode_and_says_so(caplog: pytest.LogCaptureFixture):
    bodies: list[Any] = []
    lines: list[str] = []
    with caplog.at_level(logging.WARNING):
        async with upstream(bodies) as url, aiohttp.ClientSession() as http:
            words = ("--engine", "openai", "--engine-url", url, "--port", "0", "--api-key", KEY)
            chosen = options(*words, "--admin-port", "0", model="gpt-x", DOCKYARD_ADMIN_TOKEN="t")
            task = asyncio.create_task(
                keep_serving(chosen, find_files(chosen.config.model, chosen.config.engine), lines.append)
            )
            await until(lambda: bool(lines) or task.done())
            base = lines[0].split("OPENAI_BASE_URL=")[1].split()[0].removesuffix("/v1")
            body = {"model": "gpt-x", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
            async with http.post(f"{base}/v1/messages", json=body, headers={"x-api-key": KEY}) as response:
                answer = json.loads(await response.text())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert answer["content"] == [{"type": "text", "text": "Hello."}]
    assert (bodies[0]["model"], bodies[0]["max_tokens"]) == ("gpt-x", 9)
    assert len([record for record in caplog.records if "text mode" in record.getMessage()]) == 1
    assert len(lines) == 1
    assert lines[0].endswith("with the token $DOCKYARD_ADMIN_TOKEN")
    assert KEY not in lines[0]


async def test_an_adapter_for_a_hosted_model_is_refused(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    async with upstream([]) as url:
        words = ("--engine", "openai", "--engine-url", url, "--engine-model", "gpt-x", "--port", "0")
        chosen = options(*words, "--adapter", str(tmp_path), model=model_folder(tmp_path))
        with pytest.raises(DockyardError, match="cannot load an adapter"):
            await keep_serving(chosen, find_files(chosen.config.model, chosen.config.engine), print)
