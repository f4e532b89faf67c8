"""SGLang's wire format: `/generate`, token ids in, token ids and logprobs out.

Written against SGLang's source of August 2026. Its prefix cache is keyed by an id that is new for each loaded adapter,
and seeds have an effect only with `--enable-deterministic-inference`.
"""

from typing import Any, Self

from pydantic import BaseModel, model_validator

from dockyard.config import EngineConfig
from dockyard.engine.checks import ServerRequirements, open_checked
from dockyard.engine.http import ModelServer, ServerResponse
from dockyard.engine.remote_engine import Ask, Draw, RemoteEngine


async def connect_sglang(server: ModelServer, config: EngineConfig, required: ServerRequirements) -> RemoteEngine:
    """Check that this server can be used for training, and return an engine over it."""
    flag = "start the server without `SGLANG_RETURN_ORIGINAL_LOGPROB` in its environment"
    return await open_checked(server, SGLangWire(), config, required, logprobs_hint=flag)


class SGLangWire:
    """Implements `Wire`."""

    generate_path = "/generate"
    adapters_path = ""
    abort_path = "/abort_request"

    def __init__(self, *, reports_versions: bool = False, adapter: str | None = None) -> None:
        """`reports_versions`: another program loads weights into the server, maybe as `adapter`, and numbers them."""
        self._reports_versions = reports_versions
        self._adapter = adapter

    def body(self, ask: Ask) -> dict[str, Any]:
        request = ask.request
        adapter = ask.adapter or self._adapter
        sampling = {
            "temperature": request.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "sampling_seed": request.seed,
            "max_new_tokens": request.max_new_tokens,
            "stop_token_ids": sorted(request.stop_ids),  # besides the model's own; `ignore_eos` would disable both
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        return {
            "rid": ask.id,
            "input_ids": request.prompt_ids.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": ask.top,
            **({"lora_path": adapter} if adapter else {}),
        }

    def headers(self, ask: Ask) -> dict[str, str]:
        """SGLang's router, in its hashing mode, sends requests with the same key to the same server."""
        return {"X-SMG-Routing-Key": ask.request.affinity} if ask.request.affinity else {}

    def draw(self, body: Any) -> Draw:
        meta = _Response.model_validate(body).meta_info
        version = meta.weight_version
        return Draw(
            token_ids=[token_id for _, token_id, _ in meta.output_token_logprobs],
            logprobs=[logprob for logprob, _, _ in meta.output_token_logprobs],
            finish="length" if meta.is_cut else meta.finish_reason.text,
            cut=meta.is_cut,
            top={str(token): logprob for position in meta.output_top_logprobs[:1] for logprob, token, _ in position},
            version=int(version) if self._reports_versions and version.isdecimal() else None,
        )

    def lacks_adapter(self, answer: ServerResponse) -> bool:
        return answer.status == 400 and "never been loaded" in answer.reason

    def command(self, model: str, rank: int) -> str:
        return (
            f"python -m sglang.launch_server --model-path {model} --enable-lora --max-lora-rank {rank} "
            "--lora-target-modules all"
        )


class _Finish(BaseModel):
    type: str
    message: str | None = None
    status_code: int | None = None
    """Set if an error ended the generation."""

    @property
    def text(self) -> str:
        return self.type if self.status_code is None else f"{self.type}: {self.message}"


class _Meta(BaseModel):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    output_top_logprobs: list[list[tuple[float, int, str | None]]] = []
    weight_version: str = ""

    @property
    def is_cut(self) -> bool:
        return self.finish_reason.text == "abort"

    @model_validator(mode="after")
    def _has_tokens(self) -> Self:
        """Require token logprobs, except of a generation that was aborted before it started."""
        if not self.is_cut and "output_token_logprobs" not in self.model_fields_set:
            raise ValueError("no `output_token_logprobs`")
        return self


class _Response(BaseModel):
    meta_info: _Meta
