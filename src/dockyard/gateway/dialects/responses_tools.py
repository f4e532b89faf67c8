"""Tools of the Responses dialect as functions, and calls of them put back into the agent's words.

A tool may sit in a namespace or take text instead of arguments. The policy sees functions alone: `agents.spawn`, and
`{"input": text}`.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from dockyard.gateway.calls import function_tool, invalid
from dockyard.gateway.history import Json, ToolCall


class _Format(BaseModel):
    definition: str | None = None


class WireTool(BaseModel):
    """A tool of any kind as a body has it."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Json | None = None
    format: _Format | None = None
    tools: "list[WireTool] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTool:
    """A tool as the agent calls it."""

    name: str
    namespace: str | None = None
    takes_text: bool = False
    function: Json = field(default_factory=dict[str, Any])
    """What the policy sees."""

    def item(self, call: ToolCall) -> Json:
        """The policy's call of it."""
        where = {} if self.namespace is None else {"namespace": self.namespace}
        named = {"call_id": call.id, "name": self.name, **where, "status": "completed"}
        if not self.takes_text:
            return new_item("function_call", "fc", **named, arguments=call.arguments_json())
        # Text whatever the policy wrote: codex ends its run when such a tool is called with anything else.
        text = call.arguments.get("input")
        text = text if isinstance(text, str) else call.arguments_json()
        return new_item("custom_tool_call", "ctc", **named, input=text)


def dotted(namespace: str | None, name: str) -> str:
    """A tool's name for the policy."""
    return name if namespace is None else f"{namespace}.{name}"


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def new_item(kind: str, prefix: str, **fields: Any) -> Json:
    return {"type": kind, "id": new_id(prefix), **fields}


def agent_tools(tools: Sequence[WireTool]) -> dict[str, AgentTool]:
    """By the policy's names, the agent's own tools. Nobody here runs those that OpenAI's servers would run."""
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
    """OpenAI would enforce the grammar of such a tool; here the policy has to read it."""
    grammar = tool.format.definition if tool.format else None
    description = "\n\n".join(text for text in (tool.description, grammar) if text)
    parameters: Json = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return function_tool(name, description, parameters)
