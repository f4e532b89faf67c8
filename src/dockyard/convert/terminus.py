"""Terminus-2 shows its replies taken apart into analysis, plan and commands; here they are put together again.

It speaks no tool calls: the model writes JSON (or XML), and the terminal answers in the user's name. Unless it was told
to keep replies as they were (`trajectory_config.raw_content`), their exact words are gone; what is made here is the
form that its prompt asks for.
"""

import json
import re
from collections.abc import Sequence

from dockyard.convert.atif import Agent, Call, Step, text_of
from dockyard.gateway.history import Json

NAME = "terminus-2"
_COMMAND, _COMPLETE = "bash_command", "mark_task_complete"
_TAKEN_APART = re.compile(r"(?:Analysis: (?P<analysis>.*?))?(?:(?:\A|\n)Plan: (?P<plan>.*))?", re.DOTALL)


def reply_of(step: Step, agent: Agent) -> str | None:
    """The reply as the model was asked to write it; None if the step shows it as it was."""
    calls, text = step.tool_calls or [], text_of(step.message)
    parts = _TAKEN_APART.fullmatch(text)
    if {call.function_name for call in calls} - {_COMMAND, _COMPLETE} or parts is None or not (calls or text):
        return None
    commands = [_arguments(call) for call in calls if call.function_name == _COMMAND]
    is_complete = any(call.function_name == _COMPLETE for call in calls)
    write = _xml if (agent.extra or {}).get("parser") == "xml" else _json
    return write(parts["analysis"] or "", parts["plan"] or "", commands, is_complete)


def _arguments(call: Call) -> Json:
    return call.call().arguments


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
