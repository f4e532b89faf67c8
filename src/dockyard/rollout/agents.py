"""How each agent and environment of a run is named to Harbor, and how an agent reaches the gateway.

Wiring is data. A name that Harbor knows and that has no row here yet is refused before anything starts.
"""

# pyright: reportMissingTypeStubs=false

import difflib
import importlib
from dataclasses import dataclass
from typing import Any

from harbor import TrialAgentConfig, TrialEnvironmentConfig, TrialVerifierConfig
from harbor.models.agent.name import AgentName
from harbor.models.environment_type import EnvironmentType

from dockyard.config import AgentConfig, EnvironmentConfig
from dockyard.errors import UsageError
from dockyard.rollout import sandbox
from dockyard.rollout.shell import API_KEY_VARIABLE

MODEL_NAME = "policy"
"""What agents call the model. Short, and without a slash, which LiteLLM would read as a provider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where one rollout's agent finds the policy."""

    url: str
    key: str


WIRED = ("shell", "oracle", "nop", "terminus-2")
"""Agents that a run may name."""


def agent_config(config: AgentConfig, endpoint: Endpoint, timeout_s: float) -> TrialAgentConfig:
    """Harbor's settings for this run's agent in one rollout."""
    common: dict[str, Any] = {"override_timeout_sec": timeout_s}
    if ":" in config.name:
        return TrialAgentConfig(
            import_path=config.name,
            model_name=f"openai/{MODEL_NAME}",
            kwargs=config.kwargs,
            env={"OPENAI_API_KEY": endpoint.key, "OPENAI_BASE_URL": endpoint.url},
            **common,
        )
    match config.name:
        case "shell":
            return TrialAgentConfig(
                import_path="dockyard.rollout.shell:ShellAgent",
                model_name=MODEL_NAME,
                kwargs={"gateway_url": endpoint.url, "max_turns": config.max_turns, **config.kwargs},
                env={API_KEY_VARIABLE: endpoint.key},
                **common,
            )
        case "terminus-2":
            # A summary would replace the history, and a recording needs asciinema in the image.
            defaults = {"enable_summarize": False, "record_terminal_session": False, "max_turns": config.max_turns}
            return TrialAgentConfig(
                name=config.name,
                model_name=f"openai/{MODEL_NAME}",
                kwargs={"api_base": endpoint.url, **defaults, **config.kwargs},
                env={"OPENAI_API_KEY": endpoint.key},
                **common,
            )
        case _:
            return TrialAgentConfig(name=config.name, kwargs=config.kwargs, **common)


def environment_config(config: EnvironmentConfig) -> TrialEnvironmentConfig:
    """Harbor's settings for this run's environment."""
    if config.type == "sandbox":
        return TrialEnvironmentConfig(import_path=sandbox.ENVIRONMENT, kwargs=config.kwargs)
    return TrialEnvironmentConfig(type=EnvironmentType(config.type), kwargs=config.kwargs)


def verifier_config(config: EnvironmentConfig) -> TrialVerifierConfig:
    """Harbor's own verifier, behind a seal where the environment has one."""
    return TrialVerifierConfig(import_path=sandbox.VERIFIER if config.type == "sandbox" else None)


def check_names(agent: AgentConfig, environment: EnvironmentConfig) -> None:
    """Refuse an agent or an environment that cannot run, before anything starts."""
    known = sorted(AgentName.values() | {"shell"})
    if agent.name not in WIRED and ":" not in agent.name:
        if agent.name in known:
            message = f"`agent.name` is `{agent.name}`, which no row here wires to the gateway yet"
            raise UsageError(message, hint=f"what runs: {', '.join(WIRED)}, or your own `module:Class`")
        raise UsageError(f"`agent.name` is `{agent.name}`, which is no agent", hint=_nearest(agent.name, list(WIRED)))
    if ":" in agent.name:
        _check_import(agent.name)
    types = ["sandbox", *(kind.value for kind in EnvironmentType)]
    if environment.type not in types:
        raise UsageError(
            f"`environment.type` is `{environment.type}`, which is no environment",
            hint=_nearest(environment.type, types),
        )


def _check_import(path: str) -> None:
    module, _, name = path.partition(":")
    try:
        found = vars(importlib.import_module(module)).get(name)
    except Exception as error:  # whatever a user's module raises, this name cannot be an agent
        message = f"`agent.name` is `{path}`, and importing `{module}` failed: {error}"
        raise UsageError(message, hint="is its folder on PYTHONPATH?") from error
    if found is None:
        raise UsageError(f"`agent.name` is `{path}`, but `{module}` has no `{name}`", hint="check the spelling")


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
