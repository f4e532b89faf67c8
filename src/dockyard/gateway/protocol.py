"""The types that the HTTP server, the wire dialects and the sessions exchange about one model call.

`ClientSampling` holds the sampling parameters of a client's request. Rollouts ignore them, because the trainer sets
the sampling; the stand-alone server uses them.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, cast

from pydantic import BaseModel, Field, ValidationError

from dockyard.gateway.token_tree import RecordedCall
from dockyard.types import Json, Message, Prompt, Turn

log = logging.getLogger(__name__)

_GREEDY_BELOW = 1e-5
"""Temperatures below this are treated as 0: dividing by them would overflow."""

UNSUPPORTED_PARAMETERS: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ("", []),
    "stop_sequences": ([],),
    "top_logprobs": (0,),
    "tool_choice": ("auto", {"type": "auto"}),
    "response_format": ({"type": "text"},),
}
"""Request parameters that are not passed to any engine, each with the values that change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSampling:
    """The sampling parameters of a client's request; None where the request has none."""

    temperature: float | None = None
    seed: int | None = None


NO_CLIENT_SAMPLING = ClientSampling()


class _SamplingBody(BaseModel):
    temperature: float | None = Field(default=None, ge=0, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)


class ClientSamplingReader:
    """Reads the sampling parameters of a request in any dialect, and warns once about each unsupported one."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def read(self, body: object) -> ClientSampling:
        wire = validate(_SamplingBody, body)
        for name, value in cast("Json", body).items():
            ignored = UNSUPPORTED_PARAMETERS.get(name)
            if ignored is None or value is None or value in ignored or name in self._warned:
                continue
            self._warned.add(name)
            log.warning("a client sent `%s` %.60r, which is not supported and has no effect (shown once)", name, value)
        temperature = wire.temperature
        if temperature is not None and temperature < _GREEDY_BELOW:
            temperature = 0.0
        return ClientSampling(temperature=temperature, seed=None if wire.seed is None else wire.seed % 2**63)


class RefusedError(Exception):
    """A model call that gets no reply. Each dialect turns it into its own error format."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


OVERFLOW = "context_length_exceeded"
"""The error code of a prompt that does not fit the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """The reply to a finished model call, recorded and ready to be sent."""

    number: int
    """The index of the call in its session's record."""
    turn: Turn | RecordedCall
    message: Message
    """The parsed reply."""
    usage: tuple[int, int] | None = None
    """Prompt and sampled tokens, if they are already known or cannot be counted from `turn`."""

    @property
    def num_prompt(self) -> int:
        return self.usage[0] if self.usage else len(self.turn.prompt_ids)

    @property
    def num_sampled(self) -> int:
        return self.usage[1] if self.usage else len(self.turn.sampled_ids)


class ModelRequest(Protocol):
    """One parsed request: what to sample, and how to write the reply in the request's dialect."""

    @property
    def prompt(self) -> Prompt: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def stream(self) -> bool: ...
    def body(self, reply: ModelReply) -> Json:
        """The response body of a request that does not stream."""
        ...

    def begin(self, reply: ModelReply | None = None) -> bytes:
        """The first bytes of a stream. `reply` is given if it is already known."""
        ...

    def keep_alive(self) -> bytes: ...
    def events(self, reply: ModelReply) -> bytes:
        """The rest of the stream, after `begin`."""
        ...

    def error_event(self, refused: RefusedError) -> bytes: ...


class Dialect(Protocol):
    """A wire format: it parses requests and formats errors, and makes no other decisions."""

    def parse(self, body: object) -> ModelRequest: ...
    def error(self, refused: RefusedError) -> Json: ...


@dataclass(frozen=True, slots=True)
class AdvertisedModel:
    """What a dialect needs to know about the served model."""

    model_name: str
    token_text: Callable[[int], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFields:
    """Which token-level fields a request asked for."""

    ids: bool
    logprobs: bool

    def of(self, reply: ModelReply) -> Json:
        fields: Json = {}
        if self.ids:
            fields["prompt_token_ids"] = reply.turn.prompt_ids.tolist()
            fields["token_ids"] = reply.turn.sampled_ids.tolist()
        if self.logprobs:
            fields["logprobs"] = None if reply.turn.logprobs is None else reply.turn.logprobs.tolist()
        return fields


def validate[T: BaseModel](kind: type[T], body: object) -> T:
    """Parse the body as the dialect's model, or refuse it with the first invalid field."""
    if not isinstance(body, dict):
        invalid("the body is not a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        invalid(first_problem(error))


def first_problem(error: ValidationError) -> str:
    """The first invalid field of a validation error, and what is wrong with it."""
    problem = error.errors(include_url=False)[0]
    place = ".".join(map(str, problem["loc"]))
    return f"`{place}`: {problem['msg']}" if place else problem["msg"]


def invalid(message: str) -> NoReturn:
    raise RefusedError(400, "invalid_request", message)


def text_part(content: object) -> object:
    """A list with one text part for a string: agents send the same text in either form."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def asks_for_structure(response_format: Json | None) -> bool:
    """Whether an OpenAI request asks for structured output."""
    return response_format is not None and response_format.get("type") not in (None, "text")


def openai_error(refused: RefusedError) -> Json:
    """The error body that OpenAI's clients expect."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    return {"error": {"message": refused.message, "type": kind, "param": None, "code": refused.code}}


def one_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Join the leading system messages into one, and turn later ones into user messages.

    Chat templates accept a system message only at the start.
    """
    num_opening = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    opening = "\n\n".join(message.text for message in messages[:num_opening])
    head = [Message("system", opening)] if num_opening else []
    later = messages[num_opening:]
    return (*head, *(_as_reminder(message) if message.role == "system" else message for message in later))


def _as_reminder(message: Message) -> Message:
    return Message("user", f"<system-reminder>\n{message.text}\n</system-reminder>")


def dump(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def event(kind: str, **fields: Any) -> bytes:
    """A server-sent event with its type in both `event:` and the data, as Anthropic and OpenAI's Responses send it."""
    return f"event: {kind}\ndata: ".encode() + dump({"type": kind, **fields}) + b"\n\n"


def function_tool(name: str, description: str | None, parameters: Json | None) -> Json:
    """A tool in the form that `Prompt.tools` holds."""
    empty: Json = {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": name, "description": description or "", "parameters": parameters or empty},
    }
