"""The Anthropic Messages dialect: requests to canonical messages, and replies back to the wire format.

Beyond Anthropic's fields, `return_token_ids` and `logprobs` add `prompt_token_ids`, `token_ids` and `logprobs` (floats)
to the response: to its object, or to `message_stop` of a stream. Sampling parameters are not read: the trainer sets the
sampling. `cache_control`, signatures and the billing block are dropped: they change with every call and do not concern
the policy.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from dockyard.gateway.protocol import (
    OVERFLOW,
    AdvertisedModel,
    ModelReply,
    RefusedError,
    TokenFields,
    dump,
    event,
    function_tool,
    invalid,
    one_system,
    text_part,
    validate,
)
from dockyard.types import ASSISTANT, Json, Message, Prompt, ToolCall


class _Text(BaseModel):
    type: Literal["text"]
    text: str


class _Thinking(BaseModel):
    type: Literal["thinking"]
    thinking: str


class _RedactedThinking(BaseModel):
    type: Literal["redacted_thinking"]


class _ToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


class _ResultBlock(BaseModel):
    type: str
    text: str | None = None
    tool_name: str | None = None


class _ToolResult(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[_ResultBlock] | None, BeforeValidator(text_part)] = None


type _Content[Block] = Annotated[list[Block], BeforeValidator(text_part)]
type _UserBlock = Annotated[_Text | _ToolResult, Field(discriminator="type")]
type _AssistantBlock = Annotated[_Text | _Thinking | _RedactedThinking | _ToolUse, Field(discriminator="type")]


class _System(BaseModel):
    role: Literal["system"]
    content: _Content[_Text] = Field(min_length=1)


class _User(BaseModel):
    role: Literal["user"]
    content: _Content[_UserBlock] = Field(min_length=1)


class _Assistant(BaseModel):
    role: Literal["assistant"]
    content: _Content[_AssistantBlock]


class _Tool(BaseModel):
    type: str | None = None
    name: str = ""
    description: str | None = None
    input_schema: Json | None = None
    defer_loading: bool | None = None


class _Body(BaseModel):
    messages: list[Annotated[_System | _User | _Assistant, Field(discriminator="role")]] = Field(min_length=1)
    system: _Content[_Text] | None = None
    tools: list[_Tool] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    """Optional, unlike in Anthropic's API, because `count_tokens` has none."""
    stream: bool | None = None
    output_config: Json | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest:
    """One request, and the options of its response."""

    prompt: Prompt
    max_tokens: int | None
    stream: bool
    tokens: TokenFields
    head: Json
    """The fields that identify the response: id, type, role, model."""

    def body(self, reply: ModelReply) -> Json:
        return {
            **self.head,
            "content": _answer_blocks(reply.message),
            "stop_reason": _stop_reason(reply),
            "stop_sequence": None,
            "usage": _usage(reply.num_prompt, reply.num_sampled),
            **self.tokens.of(reply),
        }

    def begin(self, reply: ModelReply | None = None) -> bytes:
        usage = _usage(reply.num_prompt if reply else 0, 0)
        message: Json = {**self.head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return event("message_start", message=message)

    def keep_alive(self) -> bytes:
        return event("ping")

    def events(self, reply: ModelReply) -> bytes:
        """The blocks, the stop reason and the usage. claude-code decides by this usage when to compact."""
        blocks = enumerate(_answer_blocks(reply.message))
        content = b"".join(part for index, block in blocks for part in _block_events(index, block))
        stop = {"stop_reason": _stop_reason(reply), "stop_sequence": None}
        usage = _usage(reply.num_prompt, reply.num_sampled)
        end = event("message_delta", delta=stop, usage=usage) + event("message_stop", **self.tokens.of(reply))
        return content + end

    def error_event(self, refused: RefusedError) -> bytes:
        return event("error", **_error(refused))


@dataclass(frozen=True, slots=True)
class MessagesDialect:
    """`/v1/messages` and `/v1/messages/count_tokens`."""

    served: AdvertisedModel

    def parse(self, body: object) -> MessagesRequest:
        wire = validate(_Body, body)
        head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": ASSISTANT}
        return MessagesRequest(
            prompt=_prompt(wire),
            max_tokens=wire.max_tokens,
            stream=bool(wire.stream),
            tokens=TokenFields(ids=bool(wire.return_token_ids), logprobs=bool(wire.logprobs)),
            head={**head, "model": self.served.model_name},
        )

    def error(self, refused: RefusedError) -> Json:
        return {"type": "error", **_error(refused)}


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def _error(refused: RefusedError) -> Json:
    if refused.code == OVERFLOW:
        # claude-code compacts its history when it reads these words.
        return {"error": {"type": "invalid_request_error", "message": f"prompt is too long: {refused.message}"}}
    other = "api_error" if refused.status >= 500 else "invalid_request_error"
    return {"error": {"type": _ERROR_TYPES.get(refused.status, other), "message": refused.message}}


def _stop_reason(reply: ModelReply) -> str:
    if reply.turn.finish.value == "length":
        return "max_tokens"
    return "tool_use" if reply.message.calls else "end_turn"


def _usage(num_prompt: int, num_sampled: int) -> dict[str, int]:
    return {
        "input_tokens": num_prompt,
        "output_tokens": num_sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _answer_blocks(message: Message) -> list[Json]:
    thinking = [{"type": "thinking", "thinking": message.reasoning, "signature": "none"}] if message.reasoning else []
    text = [{"type": "text", "text": message.text}] if message.text else []
    calls = [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in message.calls]
    return [*thinking, *text, *calls] or [{"type": "text", "text": ""}]


def _block_events(index: int, block: Json) -> Iterator[bytes]:
    """The events of one block in a stream: start, deltas, stop."""
    empty: Json
    match block["type"]:
        case "thinking":
            empty = {**block, "thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        case "tool_use":
            empty = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": dump(block["input"]).decode()}]
        case _:
            empty = {**block, "text": ""}
            deltas = [{"type": "text_delta", "text": block["text"]}]
    yield event("content_block_start", index=index, content_block=empty)
    for delta in deltas:
        yield event("content_block_delta", index=index, delta=delta)
    yield event("content_block_stop", index=index)


def _prompt(wire: _Body) -> Prompt:
    own = _own_tools(wire.tools or ())
    tools = tuple(_function(tool) for tool in own if not tool.defer_loading)
    deferred = {tool.name: _function(tool) for tool in own if tool.defer_loading}
    system = [Message("system", block.text) for block in _without_billing(wire.system or ())]
    messages = [message for turn in wire.messages for message in _messages(turn, deferred)]
    structured = bool((wire.output_config or {}).get("format"))
    return Prompt(one_system([*system, *messages]), tools, auxiliary=structured and not tools)


def _without_billing(system: Sequence[_Text]) -> Sequence[_Text]:
    billed = system and system[0].text.startswith("x-anthropic-billing-header:")
    return system[1:] if billed else system


def _own_tools(wire: Sequence[_Tool]) -> Sequence[_Tool]:
    """The agent's own tools. Tools that Anthropic's servers would run are left out."""
    own = [(index, tool) for index, tool in enumerate(wire) if tool.type in (None, "custom")]
    for index, tool in own:
        if not tool.name:
            invalid(f"`tools.{index}.name` is missing")
    return [tool for _, tool in own]


def _function(tool: _Tool) -> Json:
    return function_tool(tool.name, tool.description, tool.input_schema)


def _messages(wire: _System | _User | _Assistant, deferred: Mapping[str, Json]) -> Iterator[Message]:
    match wire:
        case _Assistant():
            yield _assistant(wire.content)
        case _User():
            yield from _user(wire.content, deferred)
        case _System():
            yield Message("system", _joined(wire.content))


def _assistant(blocks: Sequence[_AssistantBlock]) -> Message:
    return Message(
        ASSISTANT,
        _joined([block for block in blocks if isinstance(block, _Text)]),
        "\n".join(block.thinking for block in blocks if isinstance(block, _Thinking)),
        tuple(ToolCall(block.id, block.name, block.input) for block in blocks if isinstance(block, _ToolUse)),
    )


def _user(blocks: Sequence[_UserBlock], deferred: Mapping[str, Json]) -> Iterator[Message]:
    """Split a user turn: chat templates expect each tool result as a message. The order is kept."""
    messages = [_text_or_result(block, deferred) for block in blocks]
    for role, run in groupby(messages, lambda message: message.role):
        if role == "user":
            yield Message("user", "\n".join(message.text for message in run))
        else:
            yield from run


def _text_or_result(block: _UserBlock, deferred: Mapping[str, Json]) -> Message:
    if isinstance(block, _Text):
        return Message("user", block.text)
    text = "\n".join(_result_text(part, deferred) for part in block.content or ())
    return Message("tool", text, call_id=block.tool_use_id)


def _result_text(block: _ResultBlock, deferred: Mapping[str, Json]) -> str:
    """The text of a block in a tool result. An image is named instead of refused, so that the rollout can continue.

    The definition of a deferred tool appears where it was loaded. Adding it to the tools would change every prompt.
    """
    if block.type == "text":
        return block.text or ""
    definition = deferred.get(block.tool_name or "")
    return dump(definition).decode() if definition else f"[{block.type}]"


def _joined(blocks: Sequence[_Text]) -> str:
    return "\n".join(block.text for block in blocks)
