"""Shared by the gateway's tests: a small generated ChatML model folder, and a scripted engine."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dockyard.engine.protocol import ContextOverflow, GenerateRequest, Generation
from dockyard.gateway.render.renderer import Renderer
from dockyard.gateway.retries import PendingCall
from dockyard.gateway.server import Gateway
from dockyard.types import Finish

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a small helper.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES = (
    "{% set opening = messages[0].content if messages[0].role == 'system' else 'You are a small helper.' %}"
    "{{ '<|im_start|>system\n' + opening }}"
    "{% if tools %}{{ '\n\nCall functions between <tool_call> tags. There are:' }}"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif message.role == 'user' or not loop.first %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Tools, calls and results in the form of Qwen2.5, and thoughts."""
CORPUS = [
    "list the files in the folder and count the lines of each",
    "echo hello > out.txt && cat out.txt | wc -l",
    "the command failed with an error, try it again in another folder",
] * 4


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE; the first control tokens are also in the vocabulary, as in SmolLM2, the others only added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<K>", normalized=True)])
    return tokenizer


def write_model(
    folder: Path, template: str | None = CHATML, *, more_tokens: Sequence[str] = (), **config: object
) -> Path:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(content, normalized=False) for content in more_tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"eos_token": {"content": "<|im_end|>"}, "add_bos_token": False}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]} | config))
    return folder


@cache
def tiny_model() -> Path:
    return write_model(Path(mkdtemp(prefix="dockyard-tiny-")))


@cache
def tiny_renderer() -> Renderer:
    return Renderer.load(tiny_model())


@cache
def tiny() -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model() / "tokenizer.json"))


@cache
def hermes_model() -> Path:
    """The same with tools; the tags of a call are tokens."""
    folder = Path(mkdtemp(prefix="dockyard-hermes-"))
    return write_model(folder, HERMES, more_tokens=["<tool_call>", "</tool_call>"])


IM_END = 2


@dataclass(frozen=True)
class Said:
    """What the engine is to sample: `text` cut into ids piece by piece, which is seldom how the tokenizer would."""

    text: str
    pieces: int = 2
    finish: Finish = Finish.STOP

    def ids(self) -> list[int]:
        cuts = [self.text[at : at + self.pieces] for at in range(0, len(self.text), self.pieces)]
        ids = [token_id for cut in cuts for token_id in tiny().encode(cut, add_special_tokens=False).ids]
        return [*ids, IM_END] if self.finish is Finish.STOP else ids


@dataclass
class FakeEngine:
    """Says its script line by line, then `done` for ever. Logprobs are -1, -2, -3, ...: no two tokens share one."""

    script: Iterable[Said | Exception | ContextOverflow] = ()
    context_length: int = 100_000
    version: int = 0
    down_s: float = 0.0
    hold: asyncio.Event | None = None
    """If there is one, every call waits for it."""
    requests: list[GenerateRequest] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    num_cancelled: int = 0
    _num_drawn: int = 0

    def __post_init__(self) -> None:
        self._lines = iter(self.script)

    async def generate(self, request: GenerateRequest) -> Generation | ContextOverflow:
        self.requests.append(request)
        line = next(self._lines, Said("done"))
        if self.hold:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        if isinstance(line, Exception):
            raise line
        if isinstance(line, ContextOverflow):
            return line
        return self._draw(line.ids(), line.finish)

    def _draw(self, ids: list[int], finish: Finish) -> Generation:
        first = self._num_drawn + 1
        self._num_drawn += len(ids)
        generation = Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=-np.arange(first, first + len(ids), dtype=np.float32),
            versions=np.full(len(ids), len(self.generations), np.int32),
            finish=finish,
        )
        self.generations.append(generation)
        return generation

    async def publish(self, adapter_dir: Path, version: int) -> None: ...

    async def close(self) -> None: ...


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300  # only against hanging
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.01)


def pending_calls(gateway: Gateway) -> list[PendingCall]:
    """The recent calls of all sessions, answered or not."""
    return [call for client in gateway._clients.values() for call in client.calls._calls.values()]


async def until_sampled(gateway: Gateway) -> None:
    """Not only by the engine: an answer is made of its tokens in a thread."""
    await until(lambda: all(call.task.done() for call in pending_calls(gateway)))


async def until_noticed(gateway: Gateway) -> None:
    """An agent has disconnected and no longer waits."""
    await until(lambda: all(call.num_waiting == 0 for call in pending_calls(gateway)))
