"""Recovers conversations from the logs of agents that write no trajectory, or one with less content than their log.

A log that cannot be parsed without guessing gives no conversation, and its trial counts as not convertible. OpenHands'
`agent/completions` has the model calls as sent. Its trajectory is made from events, and has `Running command: ls` in
place of the model's own text.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dockyard.chat_format import parse_exchange, parse_message
from dockyard.convert.atif import UnreadableError
from dockyard.convert.conversation import Conversation, conversations_of
from dockyard.convert.trace_text import as_dict, as_list
from dockyard.convert.trajectory import TrajectoryText
from dockyard.types import ASSISTANT, Exchange, Json, Message, ToolCall

LOG_IS_BETTER = ("mini-swe-agent",)
"""Agents whose own log has more content than the trajectory that Harbor converts it to."""
_AIDER_START = re.compile(r"\n# aider chat started at [^\n]*\n\n.*?(?<=\n)> Aider v[^\n]*  \n", re.DOTALL)
"""The command comes before the version, and contains the instruction with all its lines."""
_AIDER_NOTES = re.compile(r"(?:> .*\n|\n(?!#### |# ))*")
_AIDER_USER = re.compile(r"\n((?:#### .*  \n)+)")
_AIDER_REPLY = re.compile(r"\n(.*?)\n\n> Tokens: \S+ sent, [^\n]*received\.[^\n]*  \n", re.DOTALL)
_AIDER_THOUGHT = re.compile(r"<(thinking-content-[0-9a-f]{32})>\n\n(.*?)\n\n</\1>\s*", re.DOTALL)
_AIDER_CONTINUES = "--restore-chat-history"
_LANGCHAIN = {"system": "system", "human": "user", "ai": ASSISTANT, "tool": "tool"}


def conversation_from_log(trial: Path, agent: str) -> tuple[Conversation, ...]:
    """The conversations in the agent's own log. Empty if there is no log, or if it is ambiguous."""
    read = _READERS.get(agent)
    folders = [folder for folder in (*sorted(trial.glob("steps/*/agent")), trial / "agent") if folder.is_dir()]
    try:
        found = [conversation for folder in folders for conversation in (read(folder) if read else ())]
    except (ValueError, KeyError, TypeError):
        return ()
    return tuple(conversation for conversation in found if conversation.replies)


def _read(file: Path) -> bytes:
    """The content of a log. A step without messages has none."""
    return file.read_bytes() if file.is_file() else b""


def _aider(folder: Path) -> Iterator[Conversation]:
    """One conversation per start, unless a later start continues it. Aider's system prompt and files are not logged."""
    text = _read(folder / "aider.chat.history.md").decode()
    messages: list[Message] = []
    place = 0
    while place < len(text):
        start = _take(_AIDER_START, text, place)
        if messages and _AIDER_CONTINUES not in start[0]:
            yield Conversation(messages=tuple(messages))
            messages = []
        place = _read_chat(text, start.end(), messages)
    if messages:
        yield Conversation(messages=tuple(messages))


def _read_chat(text: str, place: int, messages: list[Message]) -> int:
    """Read the messages up to the next start, or to the end. Returns where it stopped."""
    while True:
        place = _take(_AIDER_NOTES, text, place).end()
        asked = _AIDER_USER.match(text, place)
        if asked is None:
            return place
        said = _AIDER_REPLY.match(text, asked.end())
        if said is None and _take(_AIDER_NOTES, text, asked.end()).end() == len(text):
            return len(text)  # the last message was not answered
        said = _take(_AIDER_REPLY, text, asked.end())
        lines = (line.removeprefix("#### ").removesuffix("  ") for line in asked[1].splitlines())
        messages += [Message("user", "\n".join(lines)), _aider_reply(said[1])]
        place = text.index("> Tokens: ", said.end(1))


def _take(pattern: re.Pattern[str], text: str, place: int) -> re.Match[str]:
    found = pattern.match(text, place)
    if found is None:
        raise ValueError(f"not an aider chat from character {place}")
    return found


def _aider_reply(text: str) -> Message:
    thought = _AIDER_THOUGHT.match(text)
    return Message(ASSISTANT, text[thought.end() :] if thought else text, thought[2] if thought else "")


def _mini_swe_agent(folder: Path) -> Iterator[Conversation]:
    """Read its own trajectory: in Harbor's version the text is in place of the reasoning."""
    recorded = json.loads(_read(folder / "mini-swe-agent.trajectory.json") or b'{"messages": []}')
    messages = [message for message in recorded["messages"] if message["role"] != "exit"]
    yield Conversation(messages=tuple(parse_message(_with_text(message)) for message in messages))


def _langgraph(folder: Path) -> Iterator[Conversation]:
    """Read the messages of the graph's last state, as Harbor's runner writes them."""
    messages: list[Message] = []
    unanswered: list[str] = []
    for message in json.loads(_read(folder / "result.json") or b'{"messages": []}')["messages"]:
        wire = _with_text(message)
        calls = tuple(_langchain_call(call) for call in wire.get("tool_calls") or ())
        role = _LANGCHAIN[wire["type"]]
        if role == "tool" and not unanswered:
            raise ValueError("a tool result without a call")
        call_id = unanswered.pop(0) if role == "tool" else ""
        unanswered += [call.id for call in calls]
        messages.append(Message(role, wire["content"], calls=calls, call_id=call_id))
    yield Conversation(messages=tuple(messages))


def _langchain_call(wire: Json) -> ToolCall:
    arguments = as_dict(wire["args"])
    if arguments is None:
        raise ValueError("a call without arguments")
    return ToolCall(str(wire["id"]), wire["name"], arguments)


def _with_text(message: Mapping[str, Any]) -> Json:
    """Join the parts of its content. Raises if a part is not text."""
    parts = as_list(message.get("content"))
    if parts is None:
        return {**message, "content": message.get("content") or ""}
    return {**message, "content": "\n".join(part if isinstance(part, str) else part["text"] for part in parts)}


_READERS: dict[str, Callable[[Path], Iterator[Conversation]]] = {
    "aider": _aider,
    "mini-swe-agent": _mini_swe_agent,
    "langgraph": _langgraph,
}


def read_completions(folder: Path) -> TrajectoryText:
    """Read the model calls that OpenHands logged. Raises `UnreadableError`."""
    files = sorted(folder.glob("*.json"), key=lambda file: (_logged_at(file), file.name))
    calls = [_read_call(file) for file in files]
    model = next((model for _, model in calls if model), "")
    return TrajectoryText(conversations=conversations_of([exchange for exchange, _ in calls]), model=model)


def _logged_at(file: Path) -> float:
    """The time at the end of the file's name."""
    try:
        return float(file.stem.rpartition("-")[2])
    except ValueError:
        return 0.0


def _read_call(file: Path) -> tuple[Exchange, str]:
    """A logged call, and the name of its model."""
    try:
        logged: Json = json.loads(file.read_bytes())
        response: Json = logged["response"]
        choice: Json = response["choices"][0]
        settings: Json = logged.get("kwargs") or {}
        recorded: Json = {
            "messages": logged.get("messages"),
            "tools": settings.get("tools") or [],
            "reply": choice.get("message"),
            "finish": choice.get("finish_reason"),
        }
        return parse_exchange(recorded), str(response.get("model") or "")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnreadableError(f"`{file}` is not a logged model call: {type(error).__name__}: {error}") from error
