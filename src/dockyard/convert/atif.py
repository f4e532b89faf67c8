"""ATIF trajectories (versions 1.0 to 1.8) as stored in files. Fields that conversion does not need are not read.

Terminus-2 stores replies split into analysis, plan and commands; they are joined again here. It uses no tool calls: the
model writes JSON (or XML), and the terminal answers as the user. Unless replies were stored as sampled
(`trajectory_config.raw_content`), their exact text is lost, and the format that its prompt asks for is used.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, Field, ValidationError

from dockyard.chat_format import parse_arguments
from dockyard.gateway.protocol import first_problem, function_tool
from dockyard.types import Json, ToolCall

_KNOWN = re.compile(r"ATIF-v1\.[0-8]")


class UnreadableError(Exception):
    """A file does not have the expected format. The message names the file."""


class ContentPart(BaseModel):
    """A part of a message, which may be text or media."""

    type: str = "text"
    text: str | None = None


type Content = str | list[ContentPart] | None


class AtifCall(BaseModel):
    """A tool call."""

    tool_call_id: str = ""
    function_name: str
    arguments: Json | str | None = None

    def call(self) -> ToolCall:
        values = self.arguments if isinstance(self.arguments, dict) else parse_arguments(self.arguments or "")
        return ToolCall(self.tool_call_id, self.function_name, values)


class Reference(BaseModel):
    """A reference to a subagent's trajectory."""

    trajectory_id: str | None = None
    trajectory_path: str | None = None


class Result(BaseModel):
    """The result of one action."""

    source_call_id: str | None = None
    content: Content = None
    subagent_trajectory_ref: list[Reference] | Reference | None = None

    def references(self) -> list[Reference]:
        found = self.subagent_trajectory_ref or []
        return [found] if isinstance(found, Reference) else found


class Observation(BaseModel):
    """The results of a step."""

    results: list[Result] = []


class Metrics(BaseModel):
    """The tokens of a step, if the agent stored them."""

    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class AtifStep(BaseModel):
    """One message and its results."""

    source: Literal["system", "user", "agent"]
    message: Content = ""
    reasoning_content: str | None = None
    tool_calls: list[AtifCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: dict[str, Any] | None = None

    @property
    def results(self) -> list[Result]:
        return self.observation.results if self.observation else []

    def extra_value(self, key: str) -> Any:
        """The value that an agent added under this key; None if there is none."""
        return (self.extra or {}).get(key)

    @property
    def replaces_context(self) -> bool:
        """Whether the history before this step was replaced by a summary."""
        management: object = self.extra_value("context_management")
        return isinstance(management, dict) and cast("Json", management).get("boundary") == "replace"


class Agent(BaseModel):
    """The agent that wrote the trajectory."""

    name: str = ""
    model_name: str | None = None
    tool_definitions: list[Json] | None = None
    extra: dict[str, Any] | None = None


class Trajectory(BaseModel):
    """The content of one file, or of a subagent inside a file."""

    schema_version: str
    trajectory_id: str | None = None
    session_id: str | None = None
    agent: Agent = Field(default_factory=Agent)
    steps: list[AtifStep]
    continued_trajectory_ref: str | None = None
    subagent_trajectories: list["Trajectory"] | None = None

    def references(self) -> Iterator[Reference]:
        """The references to the subagents that it started."""
        for step in self.steps:
            for result in step.results:
                yield from result.references()

    def tools(self) -> tuple[Json, ...]:
        """Its tools, in the form of `Prompt.tools`."""
        return tuple(tool for wire in self.agent.tool_definitions or () if (tool := _tool(wire)))


def read_trajectory(file: Path) -> Trajectory:
    """Read a trajectory file. Raises `UnreadableError`, or FileNotFoundError."""
    try:
        trajectory = Trajectory.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise UnreadableError(f"`{file}` is not an ATIF trajectory: {first_problem(error)}") from error
    if not _KNOWN.fullmatch(trajectory.schema_version):
        raise UnreadableError(f"`{file}` is `{trajectory.schema_version}`; `ATIF-v1.0` to `ATIF-v1.8` are supported")
    return trajectory


def text_of(content: Content) -> str:
    """The content as text; media is named by its type."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or "" if part.type == "text" else f"[{part.type}]" for part in content)


def _tool(wire: Json) -> Json | None:
    """Convert a tool definition: in OpenAI's form, without its outer object, or with Anthropic's `input_schema`."""
    inner: object = wire.get("function", wire)
    function = cast("Json", inner) if isinstance(inner, dict) else {}
    name: object = function.get("name")
    if not isinstance(name, str) or not name:
        return None
    return function_tool(name, function.get("description"), function.get("parameters") or function.get("input_schema"))


NAME = "terminus-2"
_COMMAND, _COMPLETE = "bash_command", "mark_task_complete"
_SPLIT_REPLY = re.compile(r"(?:Analysis: (?P<analysis>.*?))?(?:(?:\A|\n)Plan: (?P<plan>.*))?", re.DOTALL)


def reply_of(step: AtifStep, agent: Agent) -> str | None:
    """The reply in the format that the model was asked for; None if the step already has it as written."""
    calls, text = step.tool_calls or [], text_of(step.message)
    parts = _SPLIT_REPLY.fullmatch(text)
    if {call.function_name for call in calls} - {_COMMAND, _COMPLETE} or parts is None or not (calls or text):
        return None
    commands = [call.call().arguments for call in calls if call.function_name == _COMMAND]
    is_complete = any(call.function_name == _COMPLETE for call in calls)
    write = _xml if (agent.extra or {}).get("parser") == "xml" else _json
    return write(parts["analysis"] or "", parts["plan"] or "", commands, is_complete)


def _json(analysis: str, plan: str, commands: Sequence[Json], is_complete: bool) -> str:
    reply: Json = {"analysis": analysis, "plan": plan, "commands": list(commands)}
    if is_complete:
        reply["task_complete"] = True
    return json.dumps(reply, indent=2, ensure_ascii=False)


def _xml(analysis: str, plan: str, commands: Sequence[Json], is_complete: bool) -> str:
    keys = [
        f'<keystrokes duration="{one.get("duration", 1.0)}">{one.get("keystrokes", "")}</keystrokes>'
        for one in commands
    ]
    lines = [
        "<response>",
        f"<analysis>\n{analysis}\n</analysis>",
        f"<plan>\n{plan}\n</plan>",
        "\n".join(["<commands>", *keys, "</commands>"]),
        *(["<task_complete>true</task_complete>"] if is_complete else []),
        "</response>",
    ]
    return "\n".join(lines)
