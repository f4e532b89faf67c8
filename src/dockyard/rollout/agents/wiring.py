"""Harbor's settings for an agent: its class, and how it gets the gateway's URL, its key and the model's name.

The differences between agents are data: a row of `table.py`, or one derived from the agent's Harbor class. An agent
that cannot work is refused before anything starts. `dockyard agents` lists all rows.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import importlib
import io
import json
import logging
import shutil
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from harbor import BaseAgent, TrialAgentConfig
from harbor.agents.factory import AgentFactory
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.models.agent.name import AgentName
from harbor.models.model_api_format import ModelApiFormat
from rich.console import Console
from rich.table import Table

from dockyard.config import AgentConfig
from dockyard.errors import UsageError
from dockyard.rollout.agents.table import OTHER_NAMES, ROWS, AgentDialect, AgentRow, Wiring
from dockyard.rollout.environments import check_options, nearest, options_of
from dockyard.rollout.shell import API_KEY_VARIABLE, ShellAgent

_log = logging.getLogger(__name__)

MODEL_NAME = "policy"
"""The model name that agents use. Without a slash, which LiteLLM would take for a provider."""
_PREINSTALLED = "dockyard.rollout.agents.preinstalled"
FORMATS = {
    AgentDialect.CHAT: ModelApiFormat.OPENAI_CHAT_COMPLETIONS,
    AgentDialect.MESSAGES: ModelApiFormat.ANTHROPIC_MESSAGES,
    AgentDialect.RESPONSES: ModelApiFormat.OPENAI_RESPONSES,
}
"""Dialect -> Harbor's name for it. The first that an agent supports is used."""
_TURN_LIMITS = ("max_turns", "max_iterations", "max_steps", "max_agent_steps", "max_model_steps")
VALIDATED = Path(__file__).with_name("validated.json")
"""Written only by the Docker test: agent -> its version and Harbor's version."""


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


def class_name(agent: str, *, may_install: bool) -> str:
    """Return the name of the class in `preinstalled` for an agent that has a program in the table."""
    return "".join(map(str.capitalize, agent.split("-"))) + ("" if may_install else "Never")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The endpoint of the policy for the agent of one rollout."""

    root_url: str
    key: str = field(repr=False)

    @property
    def url(self) -> str:
        """The base URL for an OpenAI client."""
        return f"{self.root_url}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wired:
    """The parts of Harbor's agent settings that connect the agent to the endpoint."""

    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    kwargs: dict[str, str] = field(default_factory=dict[str, str])
    env: dict[str, str] = field(default_factory=dict[str, str])
    """Harbor omits the values of variables with names like keys from the trial's files."""


def wire(row: AgentRow, endpoint: Endpoint) -> Wired:
    """Return the settings that connect an agent to this endpoint."""
    model: dict[str, Any] = {"model_name": f"{row.provider}/{MODEL_NAME}" if row.provider else MODEL_NAME}
    url = endpoint.root_url if row.at_root else endpoint.url
    match row.wiring:
        case Wiring.NONE:
            return Wired()
        case Wiring.ENV:
            return Wired(fields=model, env={"OPENAI_API_KEY": endpoint.key, "OPENAI_BASE_URL": url})
        case Wiring.KWARGS:
            kwargs = {row.url_kwarg: url, row.key_name_kwarg: API_KEY_VARIABLE}
            kwargs.pop("", None)
            if not row.provider:  # otherwise Harbor spends seconds importing litellm to look for one
                model["skip_model_parsing"] = True
            return Wired(fields=model, kwargs=kwargs, env={API_KEY_VARIABLE: endpoint.key})
        case Wiring.HARBOR:
            connection = {"base_url": url, "model_api_key_name": API_KEY_VARIABLE}
            dialect = {"model_api_format": FORMATS[row.dialect]} if row.chooses_dialect else {}
            return Wired(fields={**model, **connection, **dialect}, env={API_KEY_VARIABLE: endpoint.key})


def agent_config(
    config: AgentConfig, endpoint: Endpoint, *, timeout_s: float, setup_timeout_s: float
) -> TrialAgentConfig:
    """Return Harbor's settings for the agent of one rollout."""
    row = _usable_row(config.name)
    wired = wire(row, endpoint)
    return TrialAgentConfig(
        **_class(config, row),
        **wired.fields,
        kwargs={**wired.kwargs, **_own_kwargs(config, row)},
        env={**row.env, **wired.env, **config.env},
        override_timeout_sec=timeout_s,
        override_setup_timeout_sec=setup_timeout_s if row.limits_setup else None,
    )


def check_agent(config: AgentConfig) -> None:
    """Raise an error for an agent that cannot run, before anything starts."""
    if config.name in OTHER_NAMES:
        _log.info("agent `%s` is run as `%s`", config.name, canonical(config.name))
    row = _usable_row(config.name)
    if config.max_turns is not None and row.turns is None and row.dialect is not AgentDialect.NONE:
        message = f"`agent.max_turns` is {config.max_turns}, but agent `{config.name}` has no such limit"
        raise UsageError(message, hint="`gateway.max_calls` limits any agent")
    if config.install == "never" and row.program is None and row.inside:
        message = f'`agent.install` is "never", but agent `{config.name}` works only with its installer'
        others = ", ".join(name for name, row in ROWS.items() if row.program)
        raise UsageError(message, hint=f"these agents can be part of the image: {others}")
    _check_kwargs(config, row)


def runs_inside(config: AgentConfig) -> bool:
    """Whether the agent's model calls come from inside the environment instead of from this process."""
    return _usable_row(config.name).inside


def _own_kwargs(config: AgentConfig, row: AgentRow) -> dict[str, Any]:
    turns = {row.turns: config.max_turns} if row.turns and config.max_turns is not None else {}
    return {**row.kwargs, **turns, **config.kwargs}


def _class(config: AgentConfig, row: AgentRow) -> dict[str, str]:
    """Return Harbor's own class, or the derived one that looks for the program in the image first."""
    name = canonical(config.name)
    if is_custom(name):
        return {"import_path": name}
    if name == "shell":
        return {"import_path": f"{ShellAgent.__module__}:{ShellAgent.__name__}"}
    # Agents that run in this process check the image for what they need themselves.
    if row.program is None or config.install == "always" or (config.install == "auto" and not row.inside):
        return {"name": name}
    return {"import_path": f"{_PREINSTALLED}:{class_name(name, may_install=config.install == 'auto')}"}


def _usable_row(name: str) -> AgentRow:
    known = [*agent_names(), *OTHER_NAMES]
    if is_custom(name):
        _check_import(name)
    elif name not in known and not name.startswith("acp:"):
        raise UsageError(f"`agent.name` is `{name}`, which is not an agent", hint=nearest(name, known))
    row = row_of(name)
    if row.refusal:
        message = f"`agent.name` is `{name}`, which cannot be trained: {row.refusal}"
        raise UsageError(message, hint="`dockyard agents` lists the agents that can")
    return row


def _check_kwargs(config: AgentConfig, row: AgentRow) -> None:
    """Run Harbor's own check of an agent's options before the first rollout. It does not cover the `shell` agent."""
    if config.name == "shell":
        check_options("agent.kwargs", config.kwargs, options_of(ShellAgent) - options_of(BaseAgent), of="shell")
    wired = wire(row, Endpoint(root_url="http://gateway", key=""))
    try:
        class_of(config.name).parse_options({**wired.kwargs, **_own_kwargs(config, row)}, {**row.env, **config.env})
    except ValueError as error:
        raise UsageError(str(error), hint="see `agent.kwargs` in the run file") from error


def _check_import(path: str) -> None:
    module, _, name = path.partition(":")
    try:
        found = imported(path)
    except Exception as error:  # a user's module may raise anything
        message = f"`agent.name` is `{path}`, and importing `{module}` failed: {error}"
        raise UsageError(message, hint="add its folder to PYTHONPATH") from error
    if found is None:
        raise UsageError(f"`agent.name` is `{path}`, but `{module}` has no `{name}`", hint="check the spelling")
    if not (isinstance(found, type) and issubclass(found, BaseAgent)):
        message = f"`agent.name` is `{path}`, but `{name}` is not a class derived from Harbor's `BaseAgent`"
        raise UsageError(message, hint="derive it from `harbor.BaseAgent`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One line of `dockyard agents`."""

    name: str
    usable: bool
    dialect: str = "-"
    runs: str = "-"
    executable: str = "-"
    wiring: str = "-"
    validated: str = "-"
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
        return Listed(name=name, usable=False, quirks=f"cannot be trained: {row.refusal}")
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
