"""Loopback servers that speak vLLM's, SGLang's and OpenAI's wire formats over a toy policy with exact logprobs.

Tokens are bytes. An adapter is one number, read from its folder when it is loaded, as the real servers do.
"""

import asyncio
import json
import socket
import threading
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from aiohttp import web
from tokenizers import Tokenizer

from dockyard.config import EngineConfig
from dockyard.engine.checks import ServerRequirements
from dockyard.engine.open import connect
from dockyard.engine.protocol import GenerateRequest, Generation
from dockyard.engine.remote_engine import RemoteEngine
from dockyard.errors import DockyardError

STOP = ord(".")
TEXT = "Say 12 words"
WANTED = ServerRequirements(model="toy/model", lora_rank=16, text=TEXT, token_ids=list(TEXT.encode()))


def logits(context: list[int], weight: float) -> npt.NDArray[np.float64]:
    """Of the next byte. The weight of an adapter moves each logit another way."""
    random = np.random.default_rng(context[-4:])
    return random.normal(scale=2.0, size=256) + weight * np.sin(np.arange(256))


def logprobs_of(context: list[int], weight: float, temperature: float) -> npt.NDArray[np.float64]:
    scaled = logits(context, weight) / temperature
    return scaled - np.logaddexp.reduce(scaled)


def write_adapter(folder: Path, weight: float, rank: int = 16) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "weight": weight}))
    return folder


@dataclass(kw_only=True)
class FakeServer:
    """What vLLM and SGLang have in common. The flags are how it was started."""

    models: tuple[str, ...] = ("policy",)
    max_model_len: int | None = 512
    processed: bool = True
    """False reports logprobs before the temperature."""
    unnormalised: bool = False
    """True reports logits, temperature applied."""
    enable_lora: bool = True
    max_lora_rank: int = 16
    api_key: str | None = None
    token_offset: int = 0
    """Of the server's bytes against ours."""
    tokenizer: Path | None = None
    """A tokenizer in place of bytes."""
    hold: asyncio.Event | None = None
    """If there is one, every generation waits for it."""
    failures: list[int] = field(default_factory=list)
    """Statuses that the next generations get instead of an answer."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    num_aborted: int = 0
    adapters: dict[str, float] = field(default_factory=dict)
    _prefix_cache: dict[tuple[str, tuple[int, ...]], float] = field(default_factory=dict)
    _runner: web.AppRunner | None = None
    _site: web.TCPSite | None = None
    port: int = 0
    """0 takes a free one."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        if not self.port:
            self._take_port()
        app = web.Application(middlewares=[self._guard])
        self.add_routes(app.router)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        # As uvicorn does, a request is dropped when its client hangs up.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await self._site.start()

    def _take_port(self) -> None:
        """Reserve it permanently, so that no other process gets it while the server is down."""
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as aiohttp's, which may then listen there too
        held.bind(("127.0.0.1", 0))
        weakref.finalize(self, held.close)
        self.port = held.getsockname()[1]

    async def stop_listening(self) -> None:
        """Stop as vLLM does on SIGTERM: clients stay connected but receive nothing more."""
        assert self._site
        await self._site.stop()

    async def stop(self) -> None:
        """As a crash would: nothing that was loaded survives."""
        assert self._runner
        await self._runner.cleanup()
        self.adapters.clear()
        self._prefix_cache.clear()

    def add_routes(self, router: web.UrlDispatcher) -> None: ...

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls[request.path] += 1
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            said = f"Incorrect API key: {request.headers.get('Authorization')}"
            return web.json_response({"error": {"message": said}}, status=401)
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return web.json_response({"detail": "Not Found"}, status=404)

    async def _models(self, request: web.Request) -> web.Response:
        cards = [{"id": name, "parent": None, "max_model_len": self.max_model_len} for name in self.models]
        loaded = [{"id": name, "parent": self.models[0], "max_model_len": None} for name in self.adapters]
        return web.json_response({"object": "list", "data": [*cards, *loaded]})

    def ids(self, text: str) -> list[int]:
        return Tokenizer.from_file(str(self.tokenizer)).encode(text).ids if self.tokenizer else list(text.encode())

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["add_special_tokens"] is False
        if self.tokenizer:
            return web.json_response({"tokens": self.ids(body["prompt"])})
        return web.json_response({"tokens": [byte + self.token_offset for byte in body["prompt"].encode()]})

    async def sample(
        self, adapter: str, prompt: list[int], *, temperature: float, seed: int, limit: int, stop: list[int]
    ) -> tuple[list[int], list[npt.NDArray[np.float64]], str]:
        """Sampled ids, what is reported at each place for every token, and why it ended."""
        # Read when the request comes in, as a real server does; what an older request computed is found by its name.
        weight = self._prefix_cache.setdefault((adapter, tuple(prompt[:4])), self.adapters.get(adapter, 0.0))
        try:
            if self.hold:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        random = np.random.default_rng(seed)
        ids: list[int] = []
        reported: list[npt.NDArray[np.float64]] = []
        while len(ids) < limit and (not ids or ids[-1] not in stop):
            context = [*prompt, *ids]
            drawn_from = logprobs_of(context, weight, temperature or 1.0)
            reported.append(self._report(context, weight, drawn_from))
            ids.append(int(drawn_from.argmax() if temperature == 0 else random.choice(256, p=np.exp(drawn_from))))
        return ids, reported, "stop" if ids[-1] in stop else "length"

    def _report(self, context: list[int], weight: float, drawn_from: npt.NDArray[np.float64]) -> Any:
        if self.unnormalised:
            return drawn_from + 20.0
        return drawn_from if self.processed else logprobs_of(context, weight, 1.0)

    def load(self, name: str, path: str) -> str | None:
        """Why not, if it cannot be loaded."""
        if not self.enable_lora:
            return "LoRA is not enabled. Use --enable-lora to enable LoRA."
        if name in self.adapters:
            return f"The lora adapter '{name}' has already been loaded."
        config = json.loads(Path(path, "adapter_config.json").read_text())
        if config["r"] > self.max_lora_rank:
            return f"LoRA rank {config['r']} is greater than max_lora_rank {self.max_lora_rank}."
        self.adapters[name] = config["weight"]
        return None


def top_of(reported: npt.NDArray[np.float64], count: int, sampled: int) -> list[tuple[int, float]]:
    """The sampled token and the likeliest ones."""
    likeliest = [int(token) for token in np.argsort(-reported)[:count]]
    return [(token, float(reported[token])) for token in dict.fromkeys([sampled, *likeliest])]


@dataclass(kw_only=True)
class FakeVLLM(FakeServer):
    """vLLM 0.32 on loopback."""

    enable_scale_out: bool = True
    runtime_lora_updating: bool = True
    old_logprobs: bool = False
    """As vLLM before 0.32: tokens as text."""
    break_answer: Any = None
    """Called on each choice before it is sent."""

    def add_routes(self, router: web.UrlDispatcher) -> None:
        if self.enable_scale_out:
            router.add_post("/inference/v1/generate", self._generate)
        if self.runtime_lora_updating:
            router.add_post("/v1/load_lora_adapter", self._load)
            router.add_post("/v1/unload_lora_adapter", self._unload)
        router.add_post("/v1/completions", self._complete)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.failures:
            return web.json_response({"error": {"message": "no"}}, status=self.failures.pop(0))
        if body["model"] not in (*self.models, *self.adapters):
            said = f"The model `{body['model']}` does not exist."
            return web.json_response({"error": {"message": said, "code": 404}}, status=404)
        self.bodies.append(body)
        asked = body["sampling_params"]
        ids, reported, finish = await self.sample(
            body["model"],
            body["token_ids"],
            temperature=asked["temperature"],
            seed=asked["seed"],
            limit=asked["max_tokens"],
            stop=asked["stop_token_ids"],
        )
        content = [
            self._entry(token, place[token])
            | {"top_logprobs": [self._entry(*top) for top in top_of(place, asked["logprobs"], token)]}
            for token, place in zip(ids, reported, strict=True)
        ]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish}
        if self.break_answer:
            self.break_answer(choice)
        return web.json_response({"request_id": "generate-tokens-1", "choices": [choice]})

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = {"token": f"token_id:{token}"} if self.old_logprobs else {"token_id": token, "rank": 1}
        return {**name, "logprob": float(logprob)}

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if problem := self.load(body["lora_name"], body["lora_path"]):
            return web.json_response({"error": {"message": problem, "type": "InternalServerError"}}, status=500)
        return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        del self.adapters[(await request.json())["lora_name"]]
        return web.Response(text="Success")

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        prompt = self.ids(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]
        ids, reported, finish = await self.sample(
            body["model"],
            prompt,
            temperature=body.get("temperature", 1.0),
            seed=body.get("seed", 0),
            limit=body["max_tokens"],
            stop=body.get("stop_token_ids", []),
        )
        logprobs = {
            "token_logprobs": [float(place[token]) for token, place in zip(ids, reported, strict=True)],
            "top_logprobs": [
                {chr(top): logprob for top, logprob in top_of(place, body["logprobs"], token)}
                for token, place in zip(ids, reported, strict=True)
            ],
        }
        choice = {"index": 0, "text": "", "token_ids": ids, "logprobs": logprobs, "finish_reason": finish}
        return web.json_response({"choices": [choice | {"prompt_token_ids": prompt}]})


@dataclass(kw_only=True)
class FakeSGLang(FakeServer):
    """SGLang on loopback."""

    weight_version: str = "default"
    cuts: list[int] = field(default_factory=list)
    """After so many tokens the next generations are given up, as when the server takes new weights."""
    routing_keys: list[str | None] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/generate", self._generate)
        router.add_post("/load_lora_adapter", self._load)
        router.add_post("/unload_lora_adapter", self._unload)
        router.add_post("/abort_request", self._abort)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.failures:
            return web.json_response({"error": {"message": "no"}}, status=self.failures.pop(0))
        adapter = body.get("lora_path")
        if adapter and adapter not in self.adapters:
            said = f"Got LoRA adapter that has never been loaded: {adapter}"
            return web.json_response({"error": {"message": said}}, status=400)
        self.bodies.append(body)
        self.routing_keys.append(request.headers.get("X-SMG-Routing-Key"))
        asked = body["sampling_params"]
        ids, reported, finish = await self.sample(
            adapter or "",
            body["input_ids"],
            temperature=asked["temperature"],
            seed=asked["sampling_seed"],
            limit=asked["max_new_tokens"],
            stop=asked["stop_token_ids"],
        )
        places = list(zip(ids, reported, strict=True))
        reason: dict[str, Any] = {"type": "stop", "matched": ids[-1]} if finish == "stop" else {"type": finish}
        if self.cuts:
            places = places[: self.cuts.pop(0)]
            reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        meta = {
            "id": body["rid"],
            "finish_reason": reason,
            "weight_version": self.weight_version,
            "output_token_logprobs": [[float(place[token]), token, None] for token, place in places],
        }
        if not places:  # it had not begun
            del meta["output_token_logprobs"]
        if body["top_logprobs_num"]:
            meta["output_top_logprobs"] = [
                [[logprob, top, None] for top, logprob in top_of(place, body["top_logprobs_num"], token)]
                for token, place in places
            ]
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        problem = self.load(body["lora_name"], body["lora_path"])
        said = {"success": problem is None, "error_message": problem, "loaded_adapters": {}}
        return web.json_response(said, status=400 if problem else 200)

    async def _unload(self, request: web.Request) -> web.Response:
        del self.adapters[(await request.json())["lora_name"]]
        return web.json_response({"success": True, "error_message": None, "loaded_adapters": {}})

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()


@dataclass(kw_only=True)
class FakeHosted(FakeServer):
    """A hosted API: chat only, or completions without ids."""

    completions: bool = False

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/chat/completions", self._chat)
        if self.completions:
            router.add_post("/v1/completions", self._complete)

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if body["model"] != "gpt":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        said = {"role": "assistant", "content": "hi"}
        return web.json_response({"choices": [{"message": said, "finish_reason": "stop"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        logprobs = {"token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]}
        choice = {"text": "a", "logprobs": logprobs, "finish_reason": "length"}
        return web.json_response({"choices": [choice]})


PROMPT = list(b"hello")
KINDS: dict[str, type[FakeServer]] = {"vllm": FakeVLLM, "sglang": FakeSGLang}


@contextmanager
def served[S: FakeServer](server: S) -> Generator[S]:
    """Answers from another thread: the command line has this one's event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@asynccontextmanager
async def serving(
    kind: str, retry_s: float = 0, num_versions: int = 1, **flags: Any
) -> AsyncGenerator[tuple[RemoteEngine, Any]]:
    server = KINDS[kind](**flags)
    await server.start()
    engine = None
    try:
        engine = await open_engine(kind, server, retry_s, num_versions)
        yield engine, server
    finally:
        if engine:
            await engine.close()
        await server.stop()


async def open_engine(kind: str, server: FakeServer, retry_s: float = 0, num_versions: int = 1) -> RemoteEngine:
    config = EngineConfig.model_validate({"type": kind, "url": server.url, "retry_s": retry_s})
    engine = await connect(config, replace(WANTED, num_versions=num_versions))
    assert isinstance(engine, RemoteEngine)
    server.bodies.clear()  # those of the start-up checks
    return engine


def ask(prompt: list[int] = PROMPT, *, limit: int = 6, temperature: float = 0.7, **more: Any) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=np.array(prompt, np.int32),
        max_new_tokens=limit,
        temperature=temperature,
        stop_ids=more.get("stop_ids", frozenset()),
        seed=more.get("seed", 7),
        version=more.get("version"),
    )


async def generate(engine: RemoteEngine, request: GenerateRequest) -> Generation:
    result = await engine.generate(request)
    assert isinstance(result, Generation)
    return result


def expected(generation: Generation, prompt: list[int], weight: float, temperature: float = 0.7) -> list[float]:
    ids = generation.token_ids.tolist()
    return [float(logprobs_of([*prompt, *ids[:at]], weight, temperature)[token_id]) for at, token_id in enumerate(ids)]


async def refusal(kind: str, wish: dict[str, Any] | None = None, **flags: Any) -> DockyardError:
    server = KINDS[kind](**flags)
    await server.start()
    try:
        with pytest.raises(DockyardError) as caught:
            await connect(EngineConfig.model_validate({"type": kind, "url": server.url} | (wish or {})), WANTED)
    finally:
        await server.stop()
    return caught.value
