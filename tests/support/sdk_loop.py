"""A loop with one tool over the OpenAI SDK, as anybody would write one."""

import json
from typing import Any

from openai import AsyncOpenAI

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]


async def converse(client: AsyncOpenAI, *, stream: bool = False) -> list[Any]:
    """Call the model, run the tools and send their results until there are no tool calls. Return the history."""
    messages: list[Any] = [{"role": "user", "content": "Add some numbers."}]
    while True:
        message = await (ask_streaming if stream else ask)(client, messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return messages
        for made in message["tool_calls"]:
            arguments = json.loads(made["function"]["arguments"])
            result = str(arguments["a"] + arguments["b"])
            messages.append({"role": "tool", "tool_call_id": made["id"], "content": result})


async def ask(client: AsyncOpenAI, messages: list[Any]) -> Any:
    reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    return reply.choices[0].message.model_dump(exclude_none=True)


async def ask_streaming(client: AsyncOpenAI, messages: list[Any]) -> Any:
    """Text and calls put together again and thoughts left out, as many loops do it."""
    content, calls = "", dict[int, Any]()
    stream = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, stream=True)
    async for chunk in stream:
        for delta in (choice.delta for choice in chunk.choices):
            content += delta.content or ""
            for part in delta.tool_calls or ():
                function = {"name": part.function.name, "arguments": part.function.arguments} if part.function else {}
                calls[part.index] = {"id": part.id, "type": "function", "function": function}
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls.values())} if calls else {})
