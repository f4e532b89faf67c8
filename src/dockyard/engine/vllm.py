"""vLLM's wire format: `/inference/v1/generate`, token ids in, token ids and logprobs out.

Closing the connection aborts a request. The prefix cache is keyed by the adapter's name (and in newer versions its
path).
"""

from typing import Any

from pydantic import BaseModel, Field

from dockyard.config import EngineConfig
from dockyard.engine.checks import ServerRequirements, open_checked
from dockyard.engine.http import ModelServer, ServerResponse
from dockyard.engine.remote_engine import Ask, Draw, RemoteEngine

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what `--max-lora-rank` accepts


async def connect_vllm(server: ModelServer, config: EngineConfig, required: ServerRequirements) -> RemoteEngine:
    """Check that this server can be used for training, and return an engine over it."""
    flag = "start the server with `--logprobs-mode processed_logprobs`"
    return await open_checked(server, VLLMWire(), config, required, logprobs_hint=flag)


def max_rank(rank: int) -> int:
    """The value of `--max-lora-rank` for adapters of this rank."""
    return next((known for known in _RANKS if known >= rank), rank)


class VLLMWire:
    """Implements `Wire`."""

    generate_path = "/inference/v1/generate"
    adapters_path = "/v1"
    abort_path = None

    def body(self, ask: Ask) -> dict[str, Any]:
        request = ask.request
        sampling = {
            "temperature": request.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": request.seed,
            "max_tokens": request.max_new_tokens,
            "stop_token_ids": sorted(request.stop_ids),
            "ignore_eos": True,  # only our stop ids count
            "logprobs": ask.top,  # besides that of the sampled token
            "detokenize": False,
        }
        return {
            "model": ask.adapter or ask.model,
            "token_ids": request.prompt_ids.tolist(),
            "sampling_params": sampling,
        }

    def headers(self, ask: Ask) -> dict[str, str]:
        return {}

    def draw(self, body: Any) -> Draw:
        choice = _Response.model_validate(body).choices[0]
        positions = choice.logprobs.content
        return Draw(
            token_ids=choice.token_ids,
            logprobs=[position.logprob for position in positions],
            finish=choice.finish_reason,
            top={entry.key: entry.logprob for position in positions[:1] for entry in position.top_logprobs},
        )

    def lacks_adapter(self, answer: ServerResponse) -> bool:
        return answer.status == 404

    def command(self, model: str, rank: int) -> str:
        # vLLM before 0.30 has no `--enable-scale-out` and does not need it.
        return (
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve {model} --enable-lora --max-lora-rank {max_rank(rank)} "
            "--logprobs-mode processed_logprobs --enable-scale-out"
        )


class _Logprob(BaseModel):
    logprob: float
    token_id: int | None = None
    token: str | None = None
    """`token_id:N`, from vLLM before 0.32."""

    @property
    def key(self) -> str:
        return self.token or str(self.token_id)


class _Position(_Logprob):
    top_logprobs: list[_Logprob] = []


class _Logprobs(BaseModel):
    content: list[_Position]


class _Choice(BaseModel):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str


class _Response(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
