"""Every agent's row: from the table, or derived from what its Harbor class declares. `dockyard agents` lists them."""

import importlib
import io
import json
import shutil
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import cast

from harbor import BaseAgent
from harbor.agents.factory import AgentFactory
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.models.agent.name import AgentName
from harbor.models.model_api_format import ModelApiFormat
from rich.console import Console
from rich.table import Table

from dockyard.config import AgentConfig
from dockyard.rollout.agents.table import OTHER_NAMES, ROWS, AgentDialect, AgentRow, Wiring
from dockyard.rollout.shell import ShellAgent

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false


FORMATS = {
    AgentDialect.CHAT: ModelApiFormat.OPENAI_CHAT_COMPLETIONS,
    AgentDialect.MESSAGES: ModelApiFormat.ANTHROPIC_MESSAGES,
    AgentDialect.RESPONSES: ModelApiFormat.OPENAI_RESPONSES,
}
"""Harbor's word for each dialect; the first that an agent speaks is taken."""
_TURN_LIMITS = ("max_turns", "max_iterations", "max_steps", "max_agent_steps", "max_model_steps")


def canonical(name: str) -> str:
    """The agent's own name."""
    return OTHER_NAMES.get(name, name)


def agent_names() -> list[str]:
    """Every name that is an agent's."""
    return sorted(AgentName.values() | ROWS.keys())


def is_custom(name: str) -> bool:
    """Whether the name is a `module:Class`. `acp:NAME` is Harbor's shorthand for its agent `acp`."""
    return ":" in name and not name.startswith("acp:")


def asks_no_model(agent: AgentConfig) -> bool:
    """Whether the agent only runs the task's solution, or nothing."""
    return row_of(agent.name).dialect is AgentDialect.NONE


def must_ask(agent: AgentConfig) -> bool:
    """Whether the agent can do nothing without its model. Of one that is somebody's own we cannot know."""
    return not is_custom(agent.name) and not asks_no_model(agent)


@cache
def row_of(name: str) -> AgentRow:
    """The row of an agent that is known, or of a `module:Class` that can be imported."""
    name = "acp" if name.startswith("acp:") else canonical(name)
    if name in ROWS:
        return ROWS[name]
    if is_custom(name):
        return custom_row(class_of(name))
    return derived_row(class_of(name))


def class_of(name: str) -> type[BaseAgent]:
    """The class of an agent that is known, or that can be imported."""
    if name == "shell":
        return ShellAgent
    if is_custom(name):
        return cast(type[BaseAgent], imported(name))
    return AgentFactory.get_agent_class(AgentName(canonical(name)))


def imported(path: str) -> object:
    """What a `module:Class` names; None when the module has no such name."""
    module, _, name = path.partition(":")
    return vars(importlib.import_module(module)).get(name)


def derived_row(agent: type[BaseAgent]) -> AgentRow:
    """What the class declares: whether it takes a base URL, what it speaks, how its turns are limited."""
    connection = agent.MODEL_CONNECTION
    if connection is None or not agent.capabilities.base_url:
        return AgentRow(refusal="Harbor cannot point it at a base URL")
    spoken = connection.supported_api_formats
    dialect = next((ours for ours, theirs in FORMATS.items() if theirs in spoken), None)
    if spoken and dialect is None:
        return AgentRow(refusal=f"it speaks {', '.join(spoken)}, which the gateway does not")
    return AgentRow(
        dialect=dialect or AgentDialect.CHAT,
        inside=issubclass(agent, BaseInstalledAgent),
        provider="anthropic" if dialect is AgentDialect.MESSAGES else "openai",
        at_root=dialect is AgentDialect.MESSAGES,
        chooses_dialect=dialect is not None,
        turns=_turn_limit(agent),
        quirks="" if dialect else "Harbor does not say what it speaks",
    )


def custom_row(agent: type[BaseAgent]) -> AgentRow:
    """As Harbor's own if it takes a base URL; else OpenAI's variables in its environment have to do."""
    if agent.MODEL_CONNECTION is not None and agent.capabilities.base_url:
        return derived_row(agent)
    return AgentRow(inside=issubclass(agent, BaseInstalledAgent), wiring=Wiring.ENV, turns=_turn_limit(agent))


def _turn_limit(agent: type[BaseAgent]) -> str | None:
    options = agent.options_model.model_fields if agent.options_model else {}
    return next((name for name in _TURN_LIMITS if name in options), None)


VALIDATED = Path(__file__).with_name("validated.json")
"""Written by the Docker test, and by nothing else: agent -> version, Harbor's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """What is shown of one agent."""

    name: str
    usable: bool
    dialect: str
    runs: str
    executable: str
    wiring: str
    validated: str
    quirks: str


def list_agents(*, as_json: bool) -> str:
    """The table of agents, as JSON or for a terminal."""
    versions = validated_versions()
    listed = [_listed(name, row_of(name), versions.get(name, "-")) for name in agent_names()]
    if as_json:
        return json.dumps([asdict(agent) for agent in listed], indent=2)
    return _drawn(sorted(listed, key=lambda agent: (not agent.usable, agent.validated == "-", agent.name)))


def validated_versions() -> dict[str, str]:
    """The version of each agent that a scripted policy drove to reward 1.0 in Docker."""
    return {name: seen["version"] for name, seen in json.loads(VALIDATED.read_text()).items()}


def _listed(name: str, row: AgentRow, validated: str) -> Listed:
    if row.refusal:
        return Listed(
            name=name,
            usable=False,
            dialect="-",
            runs="-",
            executable="-",
            wiring="-",
            validated="-",
            quirks=f"cannot be trained: {row.refusal}",
        )
    return Listed(
        name=name,
        usable=True,
        dialect=row.dialect,
        runs="-" if row.dialect is AgentDialect.NONE else "inside" if row.inside else "our process",
        executable=row.program.executable if row.program else "-",
        wiring=row.wiring,
        validated=validated,
        quirks=row.quirks,
    )


def _drawn(agents: list[Listed]) -> str:
    table = Table("agent", "dialect", "model calls", "in the image", "wiring", "validated", "quirks", box=None)
    for column in table.columns:
        column.overflow = "fold"
    for agent in agents:
        style = None if agent.usable else "dim"
        cells = (agent.name, agent.dialect, agent.runs, agent.executable, agent.wiring, agent.validated, agent.quirks)
        table.add_row(*cells, style=style)
    console = Console(file=io.StringIO(), width=max(120, shutil.get_terminal_size().columns))
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()
