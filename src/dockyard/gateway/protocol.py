"""What the HTTP server, a dialect and a session exchange about one model call.

`ClientSampling` holds the sampling parameters that a client asked for. A rollout ignores them, because sampling is the
trainer's; a stand-alone server honours them.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, cast

from pydantic import BaseModel, Field, ValidationError

from dockyard.gateway.messages import Message, Prompt
from dockyard.types import Finish, FloatArray, IntArray, Json

log = logging.getLogger(__name__)

_GREEDY_BELOW = 1e-5
"""A temperature that small would overflow what it divides, and means 0."""

UNSERVED: dict[str, tuple[object, ...]] = {
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
"""Parameters that no engine here is given, with the values that ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSampling:
    """Sampling as the client wants it; None where it did not say."""

    temperature: float | None = None
    seed: int | None = None


NO_WISHES = ClientSampling()


class _Body(BaseModel):
    temperature: float | None = Field(default=None, ge=0, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)


class WishReader:
    """Reads wishes out of any dialect's body, and says once about each kind that it goes unheard."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def read(self, body: object) -> ClientSampling:
        wire = validate(_Body, body)
        for name, value in cast("dict[str, Any]", body).items():
            if name in UNSERVED and value is not None and value not in UNSERVED[name]:
                self._say_unserved(name, value)
        temperature = wire.temperature
        if temperature is not None and temperature < _GREEDY_BELOW:
            temperature = 0.0
        return ClientSampling(temperature=temperature, seed=None if wire.seed is None else wire.seed % 2**63)

    def _say_unserved(self, name: str, value: object) -> None:
        if name not in self._said:
            self._said.add(name)
            log.warning("a client asks for `%s` %.60r, which has no effect here (said once)", name, value)


class RefusedError(Exception):
    """A call that gets no answer. Each dialect says it in its own words."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


OVERFLOW = "context_length_exceeded"
RAW = "__raw__"
"""The argument that holds what is no JSON object."""


class AnyTurn(Protocol):
    """A `Turn`, or the record of one."""

    @property
    def prompt_ids(self) -> IntArray: ...
    @property
    def sampled_ids(self) -> IntArray: ...
    @property
    def logprobs(self) -> FloatArray: ...
    @property
    def finish(self) -> Finish: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A finished call, recorded and ready to be sent."""

    number: int
    """The forest's name for it."""
    turn: AnyTurn
    message: Message
    """What the policy said, parsed."""
    usage: tuple[int, int] | None = None
    """Prompt and sampled tokens, where they need not or cannot be counted here."""

    @property
    def num_prompt(self) -> int:
        return self.usage[0] if self.usage else len(self.turn.prompt_ids)

    @property
    def num_sampled(self) -> int:
        return self.usage[1] if self.usage else len(self.turn.sampled_ids)


class Call(Protocol):
    """One parsed request: what to sample, and how to say the answer in its dialect."""

    @property
    def prompt(self) -> Prompt: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def stream(self) -> bool: ...
    def body(self, reply: Reply) -> Json: ...
    def begin(self, reply: Reply | None = None) -> bytes:
        """What opens a stream; `reply` when the answer is already there."""
        ...

    def keep_alive(self) -> bytes: ...
    def events(self, reply: Reply) -> bytes:
        """The rest of the stream, after `begin`."""
        ...

    def error_event(self, refused: RefusedError) -> bytes: ...


class Dialect(Protocol):
    """A wire format. Translates, and decides nothing."""

    def parse(self, body: object) -> Call: ...
    def error(self, refused: RefusedError) -> Json: ...


@dataclass(frozen=True, slots=True)
class Served:
    """What every dialect tells about the model it serves."""

    model_name: str
    token_text: Callable[[int], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFields:
    """What a caller asked to see of the tokens behind an answer."""

    ids: bool
    logprobs: bool

    def of(self, reply: Reply) -> Json:
        fields: Json = {}
        if self.ids:
            fields["prompt_token_ids"] = reply.turn.prompt_ids.tolist()
            fields["token_ids"] = reply.turn.sampled_ids.tolist()
        if self.logprobs:
            fields["logprobs"] = reply.turn.logprobs.tolist()
        return fields


def validate[T: BaseModel](kind: type[T], body: object) -> T:
    """The body as its dialect's model, or a refusal that names the first wrong field."""
    if not isinstance(body, dict):
        invalid("the body is not a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        invalid(f"`{place}`: {problem['msg']}" if place else problem["msg"])


def invalid(message: str) -> NoReturn:
    raise RefusedError(400, "invalid_request", message)


def arguments_object(text: str) -> Json:
    """Tool arguments as an agent sends them back: a JSON object in a string. Anything else is kept as text."""
    return {RAW: text} if (value := strict_object(text or "{}")) is None else value


def strict_object(value: object) -> Json | None:
    """A JSON object that any JSON reader reads back, from its text or from Python; None for everything else."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
        # NaN is Python's, not JSON's; half a surrogate pair is no text.
        clean = json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace")
    except (ValueError, TypeError, RecursionError):
        return None
    return json.loads(clean) if isinstance(value, dict) else None


def one_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Opening system texts become one; a later one becomes a user's reminder, as templates know only the first."""
    num_opening = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    opening = "\n\n".join(message.text for message in messages[:num_opening])
    head = [Message("system", opening)] if num_opening else []
    return (*head, *map(_as_reminder, messages[num_opening:]))


def _as_reminder(message: Message) -> Message:
    if message.role != "system":
        return message
    return Message("user", f"<system-reminder>\n{message.text}\n</system-reminder>")


def dump(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def event(kind: str, **fields: Any) -> bytes:
    """A server-sent event that says its kind twice, as Anthropic's and OpenAI's Responses do."""
    return f"event: {kind}\ndata: ".encode() + dump({"type": kind, **fields}) + b"\n\n"


def function_tool(name: str, description: str | None, parameters: Json | None) -> Json:
    """A tool in the one form that `Prompt.tools` has."""
    empty: Json = {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": name, "description": description or "", "parameters": parameters or empty},
    }
