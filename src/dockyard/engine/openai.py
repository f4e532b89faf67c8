"""Any OpenAI-compatible endpoint: an engine if it returns token ids, otherwise a source of text."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from dockyard.config import EngineConfig
from dockyard.engine.checks import ServerRequirements, check_ids, check_logprobs, find_card, served_as
from dockyard.engine.http import ModelServer, ServerResponse
from dockyard.engine.remote_engine import Ask, Draw, RemoteEngine, key_hint
from dockyard.errors import EngineError

logger = logging.getLogger(__name__)

URL_HINT = "check `engine.url`; it is the base URL that a client of the endpoint would use"


class TextEndpoint:
    """An endpoint that returns no token ids. Its replies are recorded as text and cannot be trained on exactly."""

    def __init__(self, server: ModelServer, model: str) -> None:
        self._server = server
        self._model = model

    @property
    def down_s(self) -> float:
        return self._server.down_s

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send a chat-completions body under the endpoint's own model name."""
        path = "/v1/chat/completions"
        answer = await self._server.generate(path, body | {"model": self._model, "stream": False})
        match answer.body:
            case {"choices": [_, *_]} if answer.ok:
                return answer.body
            case _:
                raise EngineError(f"`{self._server.url}{path}` refused: {answer.reason}", hint=key_hint(answer))

    async def close(self) -> None:
        await self._server.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointProbe:
    """What an endpoint returned for a short completion."""

    card: Mapping[str, Any]
    """The model's entry in `/v1/models`."""
    prompt_ids: list[int] | None
    """The token ids of the prompt; None if the endpoint returns no token ids."""

    @property
    def model(self) -> str:
        return str(self.card["id"])


async def probe_endpoint(server: ModelServer, config: EngineConfig, text: str) -> EndpointProbe:
    """Complete `text` by one token to see whether the endpoint returns token ids; warn if it does not."""
    path = CompletionsWire.generate_path
    card = await find_card(server, config, hint=URL_HINT)
    probe = {"prompt": text, "max_tokens": 1, "logprobs": 1, "return_token_ids": True}
    answer = await server.post(path, probe | {"model": card["id"]})
    if answer.status in (401, 403):
        raise EngineError(f"`{server.url}{path}` refused: {answer.reason}", hint=key_hint(answer))
    prompt_ids = _prompt_ids(answer)
    if prompt_ids is None:
        logger.warning(
            "%s returns no token ids: text mode. Rollouts are recorded as text, without tokens and logprobs, "
            "and nothing can be trained on them exactly",
            server.url,
        )
    return EndpointProbe(card=card, prompt_ids=prompt_ids)


async def connect_openai(
    server: ModelServer, config: EngineConfig, required: ServerRequirements
) -> RemoteEngine | TextEndpoint:
    """Return an engine over this endpoint if it returns token ids, as vLLM does, and a `TextEndpoint` otherwise."""
    wire = CompletionsWire()
    endpoint = await probe_endpoint(server, config, required.text)
    if endpoint.prompt_ids is None:
        return TextEndpoint(server, endpoint.model)
    served = served_as(server, config, endpoint.card)
    # A beginning-of-text token may come first; there is no standard way to leave it out.
    prompt_ids = endpoint.prompt_ids[-len(required.token_ids) :]
    check_ids(server, prompt_ids, required, hint=f"serve `{required.model}` there")
    hint = "if the server is vLLM, start it with `--logprobs-mode processed_logprobs`"
    await check_logprobs(server, wire, served, required, hint=hint)
    return RemoteEngine(server, wire, served)


def _prompt_ids(answer: ServerResponse) -> list[int] | None:
    """The token ids of the prompt, as the answer reports them; None if it has no token ids."""
    try:
        choice = _Response.model_validate(answer.body).choices[0] if answer.ok else None
    except ValidationError:
        return None
    return choice.prompt_token_ids if choice else None


class CompletionsWire:
    """Implements `Wire` by `/v1/completions` with the fields that vLLM adds to it."""

    generate_path = "/v1/completions"
    adapters_path = None
    abort_path = None

    def body(self, ask: Ask) -> dict[str, Any]:
        request = ask.request
        return {
            "model": ask.model,
            "prompt": request.prompt_ids.tolist(),
            "temperature": request.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": request.seed,
            "max_tokens": request.max_new_tokens,
            "stop_token_ids": sorted(request.stop_ids),
            "logprobs": max(ask.top, 1),
            "return_token_ids": True,
        }

    def headers(self, ask: Ask) -> dict[str, str]:
        return {}

    def draw(self, body: Any) -> Draw:
        choice = _Response.model_validate(body).choices[0]
        return Draw(
            token_ids=choice.token_ids,
            logprobs=choice.logprobs.token_logprobs,
            finish=choice.finish_reason,
            top=choice.logprobs.top_logprobs[0] if choice.logprobs.top_logprobs else {},
        )

    def lacks_adapter(self, answer: ServerResponse) -> bool:
        return False

    def command(self, model: str, rank: int) -> str:
        return f"vllm serve {model} --logprobs-mode processed_logprobs"


class _Logprobs(BaseModel):
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None = None


class _Choice(BaseModel):
    token_ids: list[int]
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs
    finish_reason: str


class _Response(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
