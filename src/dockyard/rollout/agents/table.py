"""The table of agents: what each Harbor agent needs in addition to what its class declares (see `rows.py`).

The versions that were tested are in `validated.json`, which the Docker test writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class AgentDialect(StrEnum):
    """The API that an agent uses to call the gateway."""

    CHAT = "chat"
    MESSAGES = "messages"
    RESPONSES = "responses"
    NONE = "none"
    """It makes no model calls."""


class Wiring(StrEnum):
    """How an agent gets its base URL, key and model name."""

    HARBOR = "base_url"
    """By Harbor's own option, which Harbor translates for the program."""
    KWARGS = "kwargs"
    """By arguments of the agent's constructor."""
    ENV = "env"
    """By environment variables, for custom agents."""
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An agent's program inside the image, which makes Harbor's installer unnecessary."""

    executable: str
    """A name on PATH, or an absolute path."""
    path: str = ":"
    """Shell code that sets the PATH, as in Harbor's own command."""
    prepare: str = ":"
    """Shell code that creates the other files that Harbor's command needs."""
    version: str | None = None
    """Shell code that prints the version. None: Harbor's own, which may be slow or depend on its installer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRow:
    """One agent."""

    dialect: AgentDialect = AgentDialect.CHAT
    inside: bool = True
    """Whether its model calls come from inside the environment; otherwise from this process."""
    wiring: Wiring = Wiring.HARBOR
    provider: str = "openai"
    """Prefix of the model name, as in LiteLLM. Empty: no prefix."""
    at_root: bool = False
    """Whether its base URL is the gateway's root, to which it appends `/v1` itself."""
    chooses_dialect: bool = True
    """Whether Harbor can set its dialect."""
    url_kwarg: str = ""
    """With `Wiring.KWARGS`: the argument for the base URL."""
    key_name_kwarg: str = ""
    """With `Wiring.KWARGS`: the argument for the name of the key's variable, if there is one."""
    program: Program | None = None
    """None: its installer always runs, or it needs no program in the image."""
    turns: str | None = None
    """The constructor argument for `agent.max_turns`. None: it has no such limit."""
    limits_setup: bool = True
    """Whether Harbor accepts a time limit for its setup; otherwise Harbor's own limit applies."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables, mostly to disable telemetry, price lists, updates, titles and calls of small models."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    quirks: str = ""
    refusal: str = ""
    """Why it cannot be used. Empty: it can."""


LOCAL_BIN = 'export PATH="$HOME/.local/bin:$PATH"'
NVM = "if [ -s ~/.nvm/nvm.sh ]; then . ~/.nvm/nvm.sh; fi"
NO_PRICE_LIST = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""LiteLLM would download one on import."""
CODEX_CONFIG: Mapping[str, Any] = {
    # With the provider `openai` it first spends seconds on endpoints that only OpenAI serves.
    "model_provider": "gateway",
    "model_providers": {"gateway": {"name": "gateway", "wire_api": "responses", "env_key": "OPENAI_API_KEY"}},
    "analytics": {"enabled": False},
    "check_for_update_on_startup": False,
    "features": {"plugins": False},  # their catalogue would be downloaded at each start
}


def _version_of(package: str, python: str) -> str:
    """Read the version from the installed package, because the program takes seconds to start."""
    return f"""{python} -c 'from importlib.metadata import version; print(version("{package}"))'"""


def _python_of(program: str) -> str:
    return f'"$(dirname "$(readlink -f "$(command -v {program})")")/python"'


ROWS: Mapping[str, AgentRow] = {
    "shell": AgentRow(
        inside=False,
        wiring=Wiring.KWARGS,
        provider="",
        url_kwarg="gateway_url",
        turns="max_turns",
        quirks="part of Dockyard, for small models: one fenced command per reply",
    ),
    "oracle": AgentRow(
        dialect=AgentDialect.NONE,
        inside=False,
        wiring=Wiring.NONE,
        quirks="runs the task's solution; nothing to train on",
    ),
    "nop": AgentRow(dialect=AgentDialect.NONE, inside=False, wiring=Wiring.NONE, quirks="does nothing"),
    "terminus-2": AgentRow(
        inside=False,
        program=Program(executable="tmux"),
        turns="max_turns",
        # A summary would replace the history; a recording needs asciinema in the image.
        kwargs={"enable_summarize": False, "record_terminal_session": False, "suppress_max_turns_warning": True},
        quirks="no tools: commands are JSON in the text; must confirm twice that it is done",
    ),
    "mini-swe-agent": AgentRow(
        program=Program(
            executable="mini-swe-agent",
            path=LOCAL_BIN,
            version=_version_of("mini-swe-agent", _python_of("mini-swe-agent")),
        ),
        env={**NO_PRICE_LIST, "MSWEA_SILENT_STARTUP": "1"},
        quirks="drops turns without a valid call; stops after three in a row",
    ),
    "qwen-coder": AgentRow(
        program=Program(
            executable="qwen",
            path=NVM,
            prepare="mkdir -p ~/.nvm ~/.qwen && touch ~/.nvm/nvm.sh && { [ -e ~/.qwen/settings.json ] || "
            """echo '{"privacy": {"usageStatisticsEnabled": false}}' > ~/.qwen/settings.json; }""",
        ),
        quirks="first prompt of 17k tokens; retries truncated or malformed calls; compacts automatically",
    ),
    "claude-code": AgentRow(
        dialect=AgentDialect.MESSAGES,
        provider="anthropic",
        at_root=True,
        program=Program(executable="claude", path=LOCAL_BIN),
        turns="max_turns",
        # The header changes between calls; an empty token prevents the use of the host's login.
        env={"CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "CLAUDE_CODE_OAUTH_TOKEN": "", "DISABLE_AUTOUPDATER": "1"},
        quirks="assumes a context of 1M tokens for unknown models: set CLAUDE_CODE_MAX_CONTEXT_TOKENS in `agent.env`",
    ),
    "codex": AgentRow(
        dialect=AgentDialect.RESPONSES,
        program=Program(executable="codex", path=NVM),
        kwargs={"config": CODEX_CONFIG},
        quirks="stops on a context overflow and on a single 429; compacts only before an overflow",
    ),
    "aider": AgentRow(
        program=Program(
            executable="aider",
            path="if [ -f ~/.local/bin/env ]; then . ~/.local/bin/env; fi",
            # Without its own price list it would download one.
            prepare="mkdir -p ~/.local/bin ~/.aider/caches && touch ~/.local/bin/env && "
            """echo '{"policy": {}}' > ~/.aider/caches/model_prices_and_context_window.json""",
            version=_version_of("aider-chat", _python_of("aider")),
        ),
        env={
            **NO_PRICE_LIST,
            "AIDER_ANALYTICS": "false",
            "AIDER_AUTO_COMMITS": "false",  # each would call the model for a message
            "AIDER_CHECK_UPDATE": "false",
            "AIDER_DETECT_URLS": "false",  # it would open them and offer to install a browser
            "AIDER_GITIGNORE": "false",
            "AIDER_SHOW_MODEL_WARNINGS": "false",
            "AIDER_SHOW_RELEASE_NOTES": "false",
        },
        quirks="no tools and no loop: whole files in one reply, in its own format",
    ),
    "openhands": AgentRow(
        program=Program(
            executable="/opt/openhands-venv/bin/python",
            prepare="ls /opt/openhands-venv/lib/python3*/site-packages/openhands/core/main.py",
            version=_version_of("openhands-ai", "/opt/openhands-venv/bin/python"),
        ),
        turns="max_iterations",
        env=NO_PRICE_LIST,
        quirks="needs `openhands.core.main`, which openhands-ai includes up to 1.6.0",
    ),
    "computer-1": AgentRow(
        inside=False, turns="max_turns", limits_setup=False, quirks="needs a desktop and a browser in the image"
    ),
    "openhands-sdk": AgentRow(turns="max_iterations", env=NO_PRICE_LIST),
    "swe-agent": AgentRow(env=NO_PRICE_LIST),
    "goose": AgentRow(at_root=True, turns="max_turns", quirks="its base URL is a host; appends `v1/chat/completions`"),
    "fabric": AgentRow(
        wiring=Wiring.KWARGS,
        url_kwarg="fabric_model_base_url",
        key_name_kwarg="fabric_model_api_key_env",
        turns="fabric_max_turns",
        quirks="needs `fabric_adapter_id` in `agent.kwargs`",
    ),
    "langgraph": AgentRow(quirks="needs the path of your project as `project_path` in `agent.kwargs`"),
    "acp": AgentRow(refusal="the agent behind it chooses its own model, for which Harbor cannot set a base URL"),
    "cline-cli": AgentRow(refusal="Harbor can set its provider and key, but not its base URL"),
    "cortex-code": AgentRow(refusal="it works with Snowflake's service only"),
    "cursor-cli": AgentRow(refusal="it works with Cursor's service only"),
    "devin": AgentRow(refusal="it works with Devin's service only"),
    "eve": AgentRow(refusal="its model is set in your project's code, for which Harbor cannot set a base URL"),
    "junie": AgentRow(refusal="Harbor can set its provider and key, but not its base URL"),
    "rovodev-cli": AgentRow(refusal="it works with Atlassian's service only"),
    "terminus": AgentRow(refusal="Harbor no longer includes this agent: use `terminus-2`"),
    "terminus-1": AgentRow(refusal="Harbor no longer includes this agent: use `terminus-2`"),
}

OTHER_NAMES = {"mini-swe-agent-plus": "mini-swe-agent"}
"""Aliases that are accepted with a message."""
