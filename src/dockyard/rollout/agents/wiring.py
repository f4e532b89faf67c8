"""Harbor's settings for an agent: its class, and how it gets the gateway's URL, its key and the model's name.

The differences between agents are data (`table.py`). An agent that cannot work is refused before anything starts.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

from harbor import BaseAgent, TrialAgentConfig

from dockyard.config import AgentConfig
from dockyard.errors import UsageError
from dockyard.rollout.agents import preinstalled
from dockyard.rollout.agents.rows import FORMATS, agent_names, canonical, class_of, imported, is_custom, row_of
from dockyard.rollout.agents.table import OTHER_NAMES, ROWS, AgentDialect, AgentRow, Wiring
from dockyard.rollout.environments import check_options, nearest, options_of
from dockyard.rollout.shell import API_KEY_VARIABLE, ShellAgent

# pyright: reportMissingTypeStubs=false


MODEL_NAME = "policy"
"""The model name that agents use. Without a slash, which LiteLLM would take for a provider."""


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


# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false


__all__ = ["MODEL_NAME", "Endpoint", "agent_config", "check_agent", "runs_inside"]

_log = logging.getLogger(__name__)


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
    derived = preinstalled.class_name(name, may_install=config.install == "auto")
    return {"import_path": f"{preinstalled.__name__}:{derived}"}


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
