"""The table of agents, as data: what each Harbor agent needs beyond what its class tells (`rows.py` reads that).

Which agents were seen to work, and in which version, is not written here: `validated.json` is the Docker test's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class AgentDialect(StrEnum):
    """What an agent speaks to the gateway."""

    CHAT = "chat"
    MESSAGES = "messages"
    RESPONSES = "responses"
    NONE = "none"
    """It makes no model calls."""


class Wiring(StrEnum):
    """How base URL, key and model name reach an agent."""

    HARBOR = "base_url"
    """Harbor's own option, which its adapter turns into what the program reads."""
    KWARGS = "kwargs"
    """Arguments of the agent's constructor."""
    ENV = "env"
    """Environment variables, for agents that Harbor knows nothing about."""
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An agent's program inside the image, where it makes Harbor's installer unnecessary."""

    executable: str
    """A name on PATH, or an absolute path."""
    path: str = ":"
    """Shell that Harbor's command runs before the program, for its PATH."""
    prepare: str = ":"
    """Shell that leaves what Harbor's command needs besides the program."""
    version: str | None = None
    """Shell that prints the version. None takes Harbor's own, which may be slow or need its installer's traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRow:
    """One agent."""

    dialect: AgentDialect = AgentDialect.CHAT
    inside: bool = True
    """Its model calls come from inside the environment; else from our process."""
    wiring: Wiring = Wiring.HARBOR
    provider: str = "openai"
    """What goes before the model's name, as LiteLLM has it. Empty: nothing."""
    at_root: bool = False
    """Its base URL is the gateway's root, to which it adds `/v1` itself."""
    chooses_dialect: bool = True
    """Harbor can be told which dialect it is to speak."""
    url_kwarg: str = ""
    """Wired by kwargs: the one that takes the base URL."""
    key_name_kwarg: str = ""
    """Wired by kwargs: the one, if any, that takes the name of the key's variable."""
    program: Program | None = None
    """None: its installer always runs, or it needs nothing in the image."""
    turns: str | None = None
    """The constructor's word for `agent.max_turns`. None: it has no such limit."""
    limits_setup: bool = True
    """Harbor can hand it the time limit of its setup; else Harbor's own limit holds."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Mostly to remove side calls: telemetry, price lists, updates, titles, small models."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    quirks: str = ""
    refusal: str = ""
    """Why it cannot be used here. Empty: it can."""


LOCAL_BIN = 'export PATH="$HOME/.local/bin:$PATH"'
NVM = "if [ -s ~/.nvm/nvm.sh ]; then . ~/.nvm/nvm.sh; fi"
NO_PRICE_LIST = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""LiteLLM would fetch one when it is imported."""
CODEX_CONFIG: Mapping[str, Any] = {
    # At a base URL of OpenAI's own provider it first tries, for seconds, what only OpenAI serves.
    "model_provider": "gateway",
    "model_providers": {"gateway": {"name": "gateway", "wire_api": "responses", "env_key": "OPENAI_API_KEY"}},
    "analytics": {"enabled": False},
    "check_for_update_on_startup": False,
    "features": {"plugins": False},  # their catalogue is fetched at each start
}


def _version_of(package: str, python: str) -> str:
    """Asked of the installed package: the program itself would take seconds to start."""
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
        quirks="ours, for small models: one fenced command per reply",
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
        # A summary would replace the history, and a recording needs asciinema in the image.
        kwargs={"enable_summarize": False, "record_terminal_session": False, "suppress_max_turns_warning": True},
        quirks="no tools: commands are JSON in the text; has to say twice that it is done",
    ),
    "mini-swe-agent": AgentRow(
        program=Program(
            executable="mini-swe-agent",
            path=LOCAL_BIN,
            version=_version_of("mini-swe-agent", _python_of("mini-swe-agent")),
        ),
        env={**NO_PRICE_LIST, "MSWEA_SILENT_STARTUP": "1"},
        quirks="drops a turn without a valid call; three in a row end it",
    ),
    "qwen-coder": AgentRow(
        program=Program(
            executable="qwen",
            path=NVM,
            prepare="mkdir -p ~/.nvm ~/.qwen && touch ~/.nvm/nvm.sh && { [ -e ~/.qwen/settings.json ] || "
            """echo '{"privacy": {"usageStatisticsEnabled": false}}' > ~/.qwen/settings.json; }""",
        ),
        quirks="first prompt of 17k tokens; asks again when a call is cut or malformed; compacts by itself",
    ),
    "claude-code": AgentRow(
        dialect=AgentDialect.MESSAGES,
        provider="anthropic",
        at_root=True,
        program=Program(executable="claude", path=LOCAL_BIN),
        turns="max_turns",
        # The header's block changes between calls; an empty token keeps the host's own login out.
        env={"CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "CLAUDE_CODE_OAUTH_TOKEN": "", "DISABLE_AUTOUPDATER": "1"},
        quirks="takes an unknown model's window for 1M tokens: set CLAUDE_CODE_MAX_CONTEXT_TOKENS in `agent.env`",
    ),
    "codex": AgentRow(
        dialect=AgentDialect.RESPONSES,
        program=Program(executable="codex", path=NVM),
        kwargs={"config": CODEX_CONFIG},
        quirks="ends on a context overflow and on a single 429; compacts only ahead of time",
    ),
    "aider": AgentRow(
        program=Program(
            executable="aider",
            path="if [ -f ~/.local/bin/env ]; then . ~/.local/bin/env; fi",
            # A price list of its own, without which it would fetch one.
            prepare="mkdir -p ~/.local/bin ~/.aider/caches && touch ~/.local/bin/env && "
            """echo '{"policy": {}}' > ~/.aider/caches/model_prices_and_context_window.json""",
            version=_version_of("aider-chat", _python_of("aider")),
        ),
        env={
            **NO_PRICE_LIST,
            "AIDER_ANALYTICS": "false",
            "AIDER_AUTO_COMMITS": "false",  # each would ask the model for a message
            "AIDER_CHECK_UPDATE": "false",
            "AIDER_DETECT_URLS": "false",  # it would fetch them, and offer to install a browser
            "AIDER_GITIGNORE": "false",
            "AIDER_SHOW_MODEL_WARNINGS": "false",
            "AIDER_SHOW_RELEASE_NOTES": "false",
        },
        quirks="no tools and no loop: whole files in one reply, in the chat's own format",
    ),
    "openhands": AgentRow(
        program=Program(
            executable="/opt/openhands-venv/bin/python",
            prepare="ls /opt/openhands-venv/lib/python3*/site-packages/openhands/core/main.py",
            version=_version_of("openhands-ai", "/opt/openhands-venv/bin/python"),
        ),
        turns="max_iterations",
        env=NO_PRICE_LIST,
        quirks="needs `openhands.core.main`, which openhands-ai has up to 1.6.0",
    ),
    "computer-1": AgentRow(
        inside=False, turns="max_turns", limits_setup=False, quirks="needs a desktop and a browser in the image"
    ),
    "openhands-sdk": AgentRow(turns="max_iterations", env=NO_PRICE_LIST),
    "swe-agent": AgentRow(env=NO_PRICE_LIST),
    "goose": AgentRow(at_root=True, turns="max_turns", quirks="its base URL is a host: it adds `v1/chat/completions`"),
    "fabric": AgentRow(
        wiring=Wiring.KWARGS,
        url_kwarg="fabric_model_base_url",
        key_name_kwarg="fabric_model_api_key_env",
        turns="fabric_max_turns",
        quirks="needs `fabric_adapter_id` in `agent.kwargs`",
    ),
    "langgraph": AgentRow(quirks="needs your project as `project_path` in `agent.kwargs`"),
    "acp": AgentRow(refusal="the agent behind it chooses its own model, and Harbor cannot give that a base URL"),
    "cline-cli": AgentRow(refusal="Harbor gives it a provider and a key, but no base URL"),
    "cortex-code": AgentRow(refusal="it talks to Snowflake's service only"),
    "cursor-cli": AgentRow(refusal="it talks to Cursor's service only"),
    "devin": AgentRow(refusal="it talks to Devin's service only"),
    "eve": AgentRow(refusal="its model is named in your project's code, and Harbor cannot give that a base URL"),
    "junie": AgentRow(refusal="Harbor gives it a provider and a key, but no base URL"),
    "rovodev-cli": AgentRow(refusal="it talks to Atlassian's service only"),
    "terminus": AgentRow(refusal="Harbor keeps the name of this old agent, but not the agent: take `terminus-2`"),
    "terminus-1": AgentRow(refusal="Harbor keeps the name of this old agent, but not the agent: take `terminus-2`"),
}

OTHER_NAMES = {"mini-swe-agent-plus": "mini-swe-agent"}
"""Names that are accepted with a message."""
