"""The OpenAI Responses dialect: requests to canonical messages, and replies back to the wire format.

Beyond OpenAI's fields, `return_token_ids` and `logprobs` add `prompt_token_ids`, `token_ids` and `logprobs` (floats) to
the response object; in a stream, to that of `response.completed`. A tool may be in a namespace or take text instead of
arguments. The policy sees plain functions: `agents.spawn`, and `{"input": text}`.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, Field

from dockyard.chat_format import parse_arguments
from dockyard.gateway.protocol import (
    AdvertisedModel,
    ModelReply,
    RefusedError,
    TokenFields,
    asks_for_structure,
    event,
    function_tool,
    invalid,
    one_system,
    openai_error,
    text_part,
    validate,
)
from dockyard.types import ASSISTANT, Json, Message, Prompt, ToolCall


class _Format(BaseModel):
    definition: str | None = None


class WireTool(BaseModel):
    """A tool of any type in a request body."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Json | None = None
    format: _Format | None = None
    tools: "list[WireTool] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTool:
    """A tool that the agent offers to the model."""

    name: str
    namespace: str | None = None
    takes_text: bool = False
    function: Json = field(default_factory=dict[str, Any])
    """The tool as the policy sees it."""

    def item(self, call: ToolCall) -> Json:
        """The output item for a call of this tool."""
        where = {} if self.namespace is None else {"namespace": self.namespace}
        named = {"call_id": call.id, "name": self.name, **where, "status": "completed"}
        if not self.takes_text:
            return new_item("function_call", "fc", **named, arguments=call.arguments_json())
        # Always text, whatever the policy wrote: codex exits when such a tool is called with anything else.
        text = call.arguments.get("input")
        text = text if isinstance(text, str) else call.arguments_json()
        return new_item("custom_tool_call", "ctc", **named, input=text)


def dotted(namespace: str | None, name: str) -> str:
    """The name that the policy uses for a tool."""
    return name if namespace is None else f"{namespace}.{name}"


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def new_item(kind: str, prefix: str, **fields: Any) -> Json:
    return {"type": kind, "id": new_id(prefix), **fields}


def agent_tools(tools: Sequence[WireTool]) -> dict[str, AgentTool]:
    """The agent's own tools by the policy's names. Tools that OpenAI's servers would run are left out."""
    return dict(_named("tools", tools, None))


def _named(place: str, tools: Sequence[WireTool], namespace: str | None) -> Iterator[tuple[str, AgentTool]]:
    for index, tool in enumerate(tools):
        if tool.type not in ("function", "custom", "namespace"):
            continue
        if not tool.name:
            invalid(f"`{place}.{index}.name` is missing")
        if tool.type == "namespace":
            yield from _named(f"{place}.{index}.tools", tool.tools or (), tool.name)
            continue
        name = dotted(namespace, tool.name)
        free = tool.type == "custom"
        function = _text_function(name, tool) if free else function_tool(name, tool.description, tool.parameters)
        yield name, AgentTool(name=tool.name, namespace=namespace, takes_text=free, function=function)


def _text_function(name: str, tool: WireTool) -> Json:
    """A function for a tool that takes text. OpenAI enforces its grammar; here it is part of the description."""
    grammar = tool.format.definition if tool.format else None
    description = "\n\n".join(text for text in (tool.description, grammar) if text)
    parameters: Json = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return function_tool(name, description, parameters)


class _Text(BaseModel):
    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


class _OutputPart(BaseModel):
    type: str
    text: str | None = None


type _Parts[Part] = Annotated[list[Part], BeforeValidator(text_part)]


class _Message(BaseModel):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: _Parts[_Text]


class _Reasoning(BaseModel):
    type: Literal["reasoning"]
    content: list[_Text] | None = None
    summary: list[_Text] | None = None


class _FunctionCall(BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class _CustomCall(BaseModel):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class _CallOutput(BaseModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: _Parts[_OutputPart]


type _Item = Annotated[_Message | _Reasoning | _FunctionCall | _CustomCall | _CallOutput, Field(discriminator="type")]


def _as_items(given: object) -> object:
    """A plain text is a user message, and a message may leave out its type."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    items = cast(list[object], given)
    return [{"type": "message", **cast(Json, item)} if isinstance(item, dict) else item for item in items]


class _TextOptions(BaseModel):
    format: Json | None = None


class _Body(BaseModel):
    input: Annotated[list[_Item], BeforeValidator(_as_items)] = Field(min_length=1)
    instructions: str | None = None
    tools: list[WireTool] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    text: _TextOptions | None = None
    previous_response_id: Any = None
    conversation: Any = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """One request, and the options of its response."""

    prompt: Prompt
    max_tokens: int | None
    stream: bool
    tokens: TokenFields
    tools: Mapping[str, AgentTool]
    """By the names that the policy uses."""
    head: Json
    """The fields that every response object repeats: id, time, model."""
    numbers: Iterator[int] = field(default_factory=count)
    """The sequence numbers of a stream's events, keep-alives included."""

    def body(self, reply: ModelReply) -> Json:
        return self._completed(reply, self._items(reply.message))

    def begin(self, reply: ModelReply | None = None) -> bytes:
        return self._event("response.created", response=self._object("in_progress"))

    def keep_alive(self) -> bytes:
        return self._event("response.in_progress", response=self._object("in_progress"))

    def events(self, reply: ModelReply) -> bytes:
        items = self._items(reply.message)
        content = b"".join(part for index, item in enumerate(items) for part in self._item_events(index, item))
        return content + self._event("response.completed", response=self._completed(reply, items))

    def error_event(self, refused: RefusedError) -> bytes:
        error = {"code": refused.code, "message": refused.message}
        return self._event("response.failed", response={**self._object("failed"), "error": error})

    def _object(self, status: str) -> Json:
        fixed: Json = {"output": [], "error": None, "incomplete_details": None, "tools": [], "tool_choice": "auto"}
        return {**self.head, "object": "response", "status": status, **fixed, "parallel_tool_calls": True}

    def _completed(self, reply: ModelReply, items: list[Json]) -> Json:
        """The finished response. One cut at the token limit is completed too: codex exits on `response.incomplete`."""
        cut = {"reason": "max_output_tokens"} if reply.turn.finish.value == "length" else None
        fields: Json = {"output": items, "incomplete_details": cut, "usage": _usage(reply)}
        return {**self._object("completed"), **fields, **self.tokens.of(reply)}

    def _items(self, message: Message) -> list[Json]:
        items: list[Json] = []
        if message.reasoning:
            thought: Json = {"type": "reasoning_text", "text": message.reasoning}
            items.append(new_item("reasoning", "rs", summary=[], content=[thought], encrypted_content="none"))
        if message.text or not (message.reasoning or message.calls):
            part: Json = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
            items.append(new_item("message", "msg", role=ASSISTANT, content=[part], status="completed"))
        # The policy may have invented a tool; the agent answers with an error.
        return [*items, *(self.tools.get(call.name, AgentTool(name=call.name)).item(call) for call in message.calls)]

    def _item_events(self, index: int, item: Json) -> Iterator[bytes]:
        """The events of one item in a stream: added, filled, done."""
        yield self._event("response.output_item.added", output_index=index, item=_unfilled(item))
        for kind, fields in _filling(item):
            yield self._event(kind, item_id=item["id"], output_index=index, **fields)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event(kind, sequence_number=next(self.numbers), **fields)


@dataclass(frozen=True, slots=True)
class ResponsesDialect:
    """`/v1/responses`."""

    served: AdvertisedModel

    def parse(self, body: object) -> ResponsesRequest:
        wire = validate(_Body, body)
        if wire.previous_response_id is not None or wire.conversation is not None:
            invalid("histories are not stored: send all of it as `input`, not `previous_response_id` or `conversation`")
        tools = agent_tools(wire.tools or ())
        head = {"id": new_id("resp"), "created_at": int(time.time()), "model": self.served.model_name}
        return ResponsesRequest(
            prompt=_prompt(wire, [tool.function for tool in tools.values()]),
            max_tokens=wire.max_output_tokens,
            stream=bool(wire.stream),
            tokens=TokenFields(ids=bool(wire.return_token_ids), logprobs=bool(wire.logprobs)),
            tools=tools,
            head=head,
        )

    def error(self, refused: RefusedError) -> Json:
        return openai_error(refused)


def _usage(reply: ModelReply) -> Json:
    return {
        "input_tokens": reply.num_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt + reply.num_sampled,
    }


def _unfilled(item: Json) -> Json:
    empty: Json = {"content": [], "arguments": "", "input": "", "status": "in_progress"}
    return {name: empty.get(name, value) for name, value in item.items()}


def _filling(item: Json) -> Iterator[tuple[str, Json]]:
    """The events between an item's `added` and `done`, from which clients assemble it."""
    match item["type"]:
        case "message":
            [part] = item["content"]
            text: Json = {"content_index": 0, "logprobs": []}
            yield "response.content_part.added", {"content_index": 0, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**text, "delta": part["text"]}
            yield "response.output_text.done", {**text, "text": part["text"]}
            yield "response.content_part.done", {"content_index": 0, "part": part}
        case "function_call":
            arguments = item["arguments"]
            yield "response.function_call_arguments.delta", {"delta": arguments}
            yield "response.function_call_arguments.done", {"name": item["name"], "arguments": arguments}
        case "custom_tool_call":
            yield "response.custom_tool_call_input.delta", {"delta": item["input"]}
            yield "response.custom_tool_call_input.done", {"input": item["input"]}
        case _:
            pass


def _prompt(wire: _Body, tools: Sequence[Json]) -> Prompt:
    messages = [Message("system", wire.instructions)] if wire.instructions else []
    for message in map(_message, wire.input):
        if messages and _continues(messages[-1], message):
            turn = messages.pop()
            message = replace(turn, text=turn.text + message.text, calls=turn.calls + message.calls)
        messages.append(message)
    structured = asks_for_structure(wire.text.format if wire.text else None)
    return Prompt(one_system(messages), tuple(tools), auxiliary=structured and not tools)


def _continues(turn: Message, part: Message) -> bool:
    """Whether two items belong to one assistant turn, which is reasoning, then text, then tool calls."""
    if turn.role != ASSISTANT or part.role != ASSISTANT:
        return False
    return bool(part.calls) or not (part.reasoning or turn.text or turn.calls)


def _message(item: _Item) -> Message:
    match item:
        case _Message():
            return Message("system" if item.role == "developer" else item.role, _joined(item.content))
        case _Reasoning():
            return Message(ASSISTANT, "", _joined(item.content or item.summary or ()))
        case _FunctionCall():
            return _called(item, parse_arguments(item.arguments))
        case _CustomCall():
            return _called(item, {"input": item.input})
        case _CallOutput():
            return Message("tool", "\n".join(map(_output_text, item.output)), call_id=item.call_id)


def _called(item: _FunctionCall | _CustomCall, arguments: Json) -> Message:
    return Message(ASSISTANT, "", calls=(ToolCall(item.call_id, dotted(item.namespace, item.name), arguments),))


def _output_text(part: _OutputPart) -> str:
    """The text of a part of a tool's output. An image is named instead of refused, so that the rollout can continue."""
    return part.text if part.text is not None else f"[{part.type.removeprefix('input_')}]"


def _joined(parts: Sequence[_Text]) -> str:
    return "\n".join(part.text for part in parts)
