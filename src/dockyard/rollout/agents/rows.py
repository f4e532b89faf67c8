"""The row of each agent: from the table, or derived from its Harbor class. `dockyard agents` lists them."""

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
"""Dialect -> Harbor's name for it. The first that an agent supports is used."""
_TURN_LIMITS = ("max_turns", "max_iterations", "max_steps", "max_agent_steps", "max_model_steps")


def canonical(name: str) -> str:
    """Return the agent's own name for an alias."""
    return OTHER_NAMES.get(name, name)


def agent_names() -> list[str]:
    """Return all agent names."""
    return sorted(AgentName.values() | ROWS.keys())


def is_custom(name: str) -> bool:
    """Whether the name is a `module:Class`. `acp:NAME` is Harbor's shorthand for its agent `acp`."""
    return ":" in name and not name.startswith("acp:")


def asks_no_model(agent: AgentConfig) -> bool:
    """Whether the agent makes no model calls: it runs the task's solution, or nothing."""
    return row_of(agent.name).dialect is AgentDialect.NONE


def must_ask(agent: AgentConfig) -> bool:
    """Whether the agent cannot work without a model call. Unknown, so False, for custom agents."""
    return not is_custom(agent.name) and not asks_no_model(agent)


@cache
def row_of(name: str) -> AgentRow:
    """Return the row of a known agent, or of an importable `module:Class`."""
    name = "acp" if name.startswith("acp:") else canonical(name)
    if name in ROWS:
        return ROWS[name]
    if is_custom(name):
        return custom_row(class_of(name))
    return derived_row(class_of(name))


def class_of(name: str) -> type[BaseAgent]:
    """Return the class of a known agent, or of an importable `module:Class`."""
    if name == "shell":
        return ShellAgent
    if is_custom(name):
        return cast(type[BaseAgent], imported(name))
    return AgentFactory.get_agent_class(AgentName(canonical(name)))


def imported(path: str) -> object:
    """Import a `module:Class`. Return None if the module has no such name."""
    module, _, name = path.partition(":")
    return vars(importlib.import_module(module)).get(name)


def derived_row(agent: type[BaseAgent]) -> AgentRow:
    """Derive a row from the class: whether it takes a base URL, its dialect, and its turn limit."""
    connection = agent.MODEL_CONNECTION
    if connection is None or not agent.capabilities.base_url:
        return AgentRow(refusal="Harbor cannot set its base URL")
    spoken = connection.supported_api_formats
    dialect = next((ours for ours, theirs in FORMATS.items() if theirs in spoken), None)
    if spoken and dialect is None:
        return AgentRow(refusal=f"it uses {', '.join(spoken)}, which the gateway does not support")
    return AgentRow(
        dialect=dialect or AgentDialect.CHAT,
        inside=issubclass(agent, BaseInstalledAgent),
        provider="anthropic" if dialect is AgentDialect.MESSAGES else "openai",
        at_root=dialect is AgentDialect.MESSAGES,
        chooses_dialect=dialect is not None,
        turns=_turn_limit(agent),
        quirks="" if dialect else "Harbor does not declare its dialect",
    )


def custom_row(agent: type[BaseAgent]) -> AgentRow:
    """Derive a row as for Harbor's agents if the class takes a base URL; otherwise set OpenAI's variables."""
    if agent.MODEL_CONNECTION is not None and agent.capabilities.base_url:
        return derived_row(agent)
    return AgentRow(inside=issubclass(agent, BaseInstalledAgent), wiring=Wiring.ENV, turns=_turn_limit(agent))


def _turn_limit(agent: type[BaseAgent]) -> str | None:
    options = agent.options_model.model_fields if agent.options_model else {}
    return next((name for name in _TURN_LIMITS if name in options), None)


VALIDATED = Path(__file__).with_name("validated.json")
"""Written only by the Docker test: agent -> its version and Harbor's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One line of `dockyard agents`."""

    name: str
    usable: bool
    dialect: str
    runs: str
    executable: str
    wiring: str
    validated: str
    quirks: str


def list_agents(*, as_json: bool) -> str:
    """Return the table of agents, as JSON or as text."""
    versions = validated_versions()
    listed = [_listed(name, row_of(name), versions.get(name, "-")) for name in agent_names()]
    if as_json:
        return json.dumps([asdict(agent) for agent in listed], indent=2)
    return _drawn(sorted(listed, key=lambda agent: (not agent.usable, agent.validated == "-", agent.name)))


def validated_versions() -> dict[str, str]:
    """Return the version of each agent with which a scripted policy reached a reward of 1.0 in Docker."""
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
