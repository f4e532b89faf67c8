"""Every agent's row: the table's, or else one made from what its Harbor class declares."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import importlib
from functools import cache
from typing import cast

from harbor import BaseAgent
from harbor.agents.factory import AgentFactory
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.models.agent.name import AgentName
from harbor.models.model_api_format import ModelApiFormat

from dockyard.config import AgentConfig
from dockyard.rollout.agents.table import OTHER_NAMES, ROWS, Dialect, Row, Wiring
from dockyard.rollout.shell import ShellAgent

FORMATS = {
    Dialect.CHAT: ModelApiFormat.OPENAI_CHAT_COMPLETIONS,
    Dialect.MESSAGES: ModelApiFormat.ANTHROPIC_MESSAGES,
    Dialect.RESPONSES: ModelApiFormat.OPENAI_RESPONSES,
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
    return row_of(agent.name).dialect is Dialect.NONE


def must_ask(agent: AgentConfig) -> bool:
    """Whether the agent can do nothing without its model. Of one that is somebody's own we cannot know."""
    return not is_custom(agent.name) and not asks_no_model(agent)


@cache
def row_of(name: str) -> Row:
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


def derived_row(agent: type[BaseAgent]) -> Row:
    """What the class declares: whether it takes a base URL, what it speaks, how its turns are limited."""
    connection = agent.MODEL_CONNECTION
    if connection is None or not agent.capabilities.base_url:
        return Row(refusal="Harbor cannot point it at a base URL")
    spoken = connection.supported_api_formats
    dialect = next((ours for ours, theirs in FORMATS.items() if theirs in spoken), None)
    if spoken and dialect is None:
        return Row(refusal=f"it speaks {', '.join(spoken)}, which the gateway does not")
    return Row(
        dialect=dialect or Dialect.CHAT,
        inside=issubclass(agent, BaseInstalledAgent),
        provider="anthropic" if dialect is Dialect.MESSAGES else "openai",
        at_root=dialect is Dialect.MESSAGES,
        chooses_dialect=dialect is not None,
        turns=_turn_limit(agent),
        quirks="" if dialect else "Harbor does not say what it speaks",
    )


def custom_row(agent: type[BaseAgent]) -> Row:
    """As Harbor's own if it takes a base URL; else OpenAI's variables in its environment have to do."""
    if agent.MODEL_CONNECTION is not None and agent.capabilities.base_url:
        return derived_row(agent)
    return Row(inside=issubclass(agent, BaseInstalledAgent), wiring=Wiring.ENV, turns=_turn_limit(agent))


def _turn_limit(agent: type[BaseAgent]) -> str | None:
    options = agent.options_model.model_fields if agent.options_model else {}
    return next((name for name in _TURN_LIMITS if name in options), None)
