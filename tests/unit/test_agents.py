"""The agents' table against Harbor's real classes, and programs in the image instead of installers."""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harbor import BaseAgent, ExecResult, TrialAgentConfig
from harbor.agents.agent_auth_resolution import resolve_agent_model_connection
from harbor.agents.factory import AgentFactory
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.models.agent.name import AgentName
from harbor.utils.env import is_sensitive_env_key

from dockyard.config import AgentConfig
from dockyard.errors import UsageError
from dockyard.rollout.agents.preinstalled import AgentMissingError
from dockyard.rollout.agents.table import ROWS, AgentDialect, Wiring
from dockyard.rollout.agents.wiring import (
    FORMATS,
    Endpoint,
    agent_config,
    agent_names,
    check_agent,
    class_of,
    list_agents,
    row_of,
    runs_inside,
)

KEY = "a-key-of-one-rollout"
ENDPOINT = Endpoint(root_url="http://gateway:8000", key=KEY)
USABLE = sorted(name for name in agent_names() if not row_of(name).refusal)
REFUSED = sorted(name for name in agent_names() if row_of(name).refusal)
WIRED_BY_HARBOR = [name for name in USABLE if row_of(name).wiring is Wiring.HARBOR]
PROGRAMS = [name for name, row in ROWS.items() if row.program]
INSTALLED = [name for name in PROGRAMS if issubclass(class_of(name), BaseInstalledAgent)]


def config_of(name: str, **settings: Any) -> TrialAgentConfig:
    return agent_config(AgentConfig(name=name, **settings), ENDPOINT, timeout_s=100, setup_timeout_s=50)


def test_every_harbor_name_is_known():
    assert set(agent_names()) == AgentName.values() | {"shell"}


@pytest.mark.parametrize("name", USABLE)
def test_a_usable_agent_gets_the_gateway_its_key_and_both_time_limits(name: str):
    config = config_of(name)
    assert (config.override_timeout_sec, config.override_setup_timeout_sec) == (
        100,
        50 if row_of(name).limits_setup else None,
    )
    assert AgentFactory.get_agent_class_from_config(config).name() in (name, class_of(name).name())
    if row_of(name).dialect is AgentDialect.NONE:
        assert KEY not in config.model_dump_json()
        return
    assert KEY in config.env.values()
    assert "http://gateway:8000" in f"{config.base_url} {config.kwargs}"


@pytest.mark.parametrize("name", REFUSED)
def test_an_agent_that_cannot_be_used_is_refused_with_the_reason(name: str):
    with pytest.raises(UsageError) as caught:
        check_agent(AgentConfig(name=name))
    assert row_of(name).refusal in caught.value.message
    with pytest.raises(UsageError):
        config_of(name)


@pytest.mark.parametrize("name", [name for name in REFUSED if not name.startswith("terminus")])
def test_no_agent_is_refused_that_harbor_could_point_at_the_gateway(name: str):
    agent = class_of(name)
    speaks = agent.MODEL_CONNECTION.supported_api_formats if agent.MODEL_CONNECTION else []
    assert not agent.capabilities.base_url or not set(FORMATS.values()) & set(speaks)


@pytest.mark.parametrize("name", USABLE)
def test_secrets_have_names_that_harbor_redacts(name: str):
    config = config_of(name)
    assert KEY not in json.dumps(config.kwargs, default=str)
    assert all(is_sensitive_env_key(variable) for variable, value in config.env.items() if value == KEY)


@pytest.mark.parametrize("name", [name for name in ROWS if name in USABLE and name != "shell"])
def test_a_row_says_what_its_harbor_class_says(name: str):
    row, agent = ROWS[name], class_of(name)
    options = set(agent.options_model.model_fields) if agent.options_model else set()
    assert row.inside == issubclass(agent, BaseInstalledAgent)
    assert {*row.kwargs, *filter(None, (row.turns, row.url_kwarg, row.key_name_kwarg))} <= options
    if row.wiring is Wiring.HARBOR:
        assert agent.capabilities.base_url
        assert agent.MODEL_CONNECTION is not None
        assert FORMATS[row.dialect] in agent.MODEL_CONNECTION.supported_api_formats


@pytest.mark.parametrize("name", WIRED_BY_HARBOR)
def test_harbor_leads_the_agent_to_the_gateway_and_to_nothing_of_the_host(name: str, monkeypatch: pytest.MonkeyPatch):
    for variable in ("OPENAI", "ANTHROPIC", "GEMINI", "LLM", "MSWEA", "CODEX", "META", "MISTRAL", "LITELLM"):
        monkeypatch.setenv(f"{variable}_API_KEY", "of-the-host")
        monkeypatch.setenv(f"{variable}_BASE_URL", "http://of-the-host")
    for variable in ("ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "of-the-host")
    connection = resolve_agent_model_connection(config_of(name))
    assert (connection.api_key, connection.model_id) == (KEY, "policy")
    assert connection.execution_base_url == (
        "http://gateway:8000" if row_of(name).at_root else "http://gateway:8000/v1"
    )
    assert not [value for value in connection.env.values() if "of-the-host" in value]


def test_the_hosts_own_login_does_not_reach_claude_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLAUDE_CODE_OAUTH_TOKEN", "of-the-host")
    assert config_of("claude-code").env["CLAUDE_CODE_OAUTH_TOKEN"] == ""


@pytest.mark.parametrize("name", [name for name in USABLE if name not in ("fabric", "langgraph", "oracle")])
def test_harbor_takes_the_settings(name: str, tmp_path: Path):
    check_agent(AgentConfig(name=name))
    agent = AgentFactory.create_agent_from_config(config_of(name), logs_dir=tmp_path)
    assert agent.name() == ("shell" if name == "shell" else class_of(name).name())


def test_settings_of_the_run_file_go_over_those_of_the_table():
    config = config_of("aider", env={"AIDER_ANALYTICS": "true", "MORE": "1"}, kwargs={"map_tokens": 0})
    assert (config.env["AIDER_ANALYTICS"], config.env["MORE"]) == ("true", "1")
    assert config.env["AIDER_CHECK_UPDATE"] == "false"
    assert config.kwargs == {"map_tokens": 0}
    assert config_of("terminus-2", kwargs={"enable_summarize": True}).kwargs["enable_summarize"] is True


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("shell", "max_turns"), ("terminus-2", "max_turns"), ("openhands", "max_iterations"), ("trae-agent", "max_steps")],
)
def test_a_turn_limit_goes_by_the_agents_own_word(name: str, kwargs: str):
    check_agent(AgentConfig(name=name, max_turns=5))
    assert config_of(name, max_turns=5).kwargs[kwargs] == 5
    assert kwargs not in config_of(name).kwargs


def test_a_turn_limit_that_an_agent_would_ignore_is_refused():
    with pytest.raises(UsageError, match="`aider` has no such limit"):
        check_agent(AgentConfig(name="aider", max_turns=5))
    check_agent(AgentConfig(name="oracle", max_turns=5))


def test_options_that_an_agent_does_not_have_are_refused():
    with pytest.raises(UsageError, match="Unknown option 'map_token'"):
        check_agent(AgentConfig(name="aider", kwargs={"map_token": 0}))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("system_promt", "did you mean `system_prompt`?"), ("gateway_url", ""), ("model_name", ""), ("kwargs", "")],
)
def test_options_that_shell_does_not_have_or_that_are_not_for_users_are_refused(name: str, hint: str):
    with pytest.raises(UsageError) as caught:
        check_agent(AgentConfig(name="shell", kwargs={name: ""}))
    assert caught.value.message == f"`agent.kwargs.{name}` is not an option of `shell`"
    assert hint in caught.value.hint


def test_options_that_shell_has_are_accepted():
    options = {"system_prompt": "", "examples": [], "command_timeout_s": 5, "max_turns": 1}
    check_agent(AgentConfig(name="shell", kwargs=options))


def test_mini_swe_agent_plus_is_mini_swe_agent_with_a_message(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        check_agent(AgentConfig(name="mini-swe-agent-plus"))
    assert "`mini-swe-agent-plus` is run as `mini-swe-agent`" in caplog.text
    assert config_of("mini-swe-agent-plus") == config_of("mini-swe-agent")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("shel", "`agent.name` is `shel`, which is not an agent", "did you mean `shell`?"),
        ("qwen-code", "which is not an agent", "did you mean `qwen-coder`?"),
        ("acp:some", "cannot set a base URL", "dockyard agents"),
        ("no_such_module:Agent", "importing `no_such_module` failed", "PYTHONPATH"),
        ("reply_agent:Other", "`reply_agent` has no `Other`", "spelling"),
        ("json:loads", "`loads` is not a class derived from Harbor's `BaseAgent`", "harbor"),
    ],
)
def test_a_name_that_is_no_agent_is_refused(name: str, message: str, hint: str):
    with pytest.raises(UsageError) as caught:
        check_agent(AgentConfig(name=name))
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_class_of_ones_own_gets_openais_variables():
    check_agent(AgentConfig(name="reply_agent:ReplyAgent"))
    config = config_of("reply_agent:ReplyAgent")
    assert (config.import_path, config.model_name) == ("reply_agent:ReplyAgent", "openai/policy")
    assert config.env == {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": "http://gateway:8000/v1"}


def test_a_class_of_ones_own_over_harbors_is_wired_as_harbors():
    config = config_of("harbor.agents.installed.goose:Goose")
    assert (config.base_url, config.model_api_key_name) == ("http://gateway:8000/v1", "DOCKYARD_API_KEY")


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("shell", False),
        ("terminus-2", False),
        ("oracle", False),
        ("dspy-rlm", False),
        ("qwen-coder", True),
        ("opencode", True),
        ("reply_agent:ReplyAgent", False),
        ("harbor.agents.installed.aider:Aider", True),
    ],
)
def test_who_calls_the_model_from_inside_the_environment(name: str, inside: bool):
    assert runs_inside(AgentConfig(name=name)) is inside


@dataclass
class FakeEnvironment:
    """As much of Harbor's environment as an agent's setup sees: an image with these programs, and no network."""

    programs: dict[str, str]
    """Name -> what asking for its version prints."""
    commands: list[str] = field(default_factory=list)
    task_env_config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(docker_image="image:1"))
    environment_dir: Path = Path("task/environment")
    default_user: None = None

    async def exec(self, command: str, **_: object) -> ExecResult:
        self.commands.append(command)
        if "https://" in command:
            return ExecResult(stdout="", stderr="curl: (6) Could not resolve host", return_code=6)
        asked = command.partition("command -v ")[2].split(" ")[0]
        if asked and asked not in self.programs:
            return ExecResult(stdout="", stderr="", return_code=127)
        return ExecResult(stdout=self.programs.get(asked, ""), stderr="", return_code=0)

    @property
    def installs(self) -> bool:
        return any("https://" in command for command in self.commands)


def made(name: str, folder: Path, **settings: Any) -> BaseAgent:
    return AgentFactory.create_agent_from_config(config_of(name, **settings), logs_dir=folder)


def executable(name: str) -> str:
    program = ROWS[name].program
    assert program is not None
    return program.executable


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize("install", ["auto", "never"])
async def test_a_program_in_the_image_is_used_without_a_network(name: str, install: str, tmp_path: Path):
    environment: Any = FakeEnvironment({executable(name): "1.2.3\n"})
    agent = made(name, tmp_path, install=install)
    await agent.setup(environment)
    assert not environment.installs
    assert agent.version() == "1.2.3"


@pytest.mark.parametrize("name", INSTALLED)
async def test_without_the_program_harbors_installer_runs(name: str, tmp_path: Path):
    environment: Any = FakeEnvironment({})
    with pytest.raises(RuntimeError, match="Could not resolve host"):
        await made(name, tmp_path).setup(environment)
    assert environment.installs


@pytest.mark.parametrize("name", PROGRAMS)
async def test_never_installing_and_no_program_is_an_error_that_says_what_to_do(name: str, tmp_path: Path):
    environment: Any = FakeEnvironment({})
    with pytest.raises(AgentMissingError) as caught:
        await made(name, tmp_path, install="never").setup(environment)
    assert f"`{executable(name)}` is not in the image `image:1`" in str(caught.value)
    assert 'agent.install = "auto"' in str(caught.value)
    assert not environment.installs


async def test_a_program_in_another_version_than_asked_for_does_not_count(tmp_path: Path):
    environment: Any = FakeEnvironment({"qwen": "1.2.3\n"})
    environment.task_env_config.docker_image = "other-version:1"
    with pytest.raises(AgentMissingError, match=r"`qwen` 1\.0\.0 is not in the image `other-version:1` \(1\.2\.3\)"):
        await made("qwen-coder", tmp_path, install="never", kwargs={"version": "1.0.0"}).setup(environment)
    await made("qwen-coder", tmp_path, install="never", kwargs={"version": "1.2.3"}).setup(environment)


async def test_the_version_in_an_image_is_asked_for_once(tmp_path: Path):
    environment: Any = FakeEnvironment({"qwen": "1.2.3\n"})
    environment.task_env_config.docker_image = "asked-once:1"
    for _ in range(2):
        agent = made("qwen-coder", tmp_path)
        await agent.setup(environment)
        assert agent.version() == "1.2.3"
    assert len([command for command in environment.commands if "qwen --version" in command]) == 1


def test_always_installing_is_harbors_own_class():
    config = config_of("qwen-coder", install="always")
    assert (config.name, config.import_path) == ("qwen-coder", None)


def test_never_installing_is_refused_where_only_the_installer_is_known_to_work():
    with pytest.raises(UsageError, match="`opencode` works only with its installer"):
        check_agent(AgentConfig(name="opencode", install="never"))
    check_agent(AgentConfig(name="oracle", install="never"))


def test_the_list_has_every_agent_and_says_what_was_validated():
    listed = {agent["name"]: agent for agent in json.loads(list_agents(as_json=True))}
    assert set(listed) == set(agent_names())
    assert listed["codex"] | {"validated": ""} == {
        "name": "codex",
        "usable": True,
        "dialect": "responses",
        "runs": "inside",
        "executable": "codex",
        "wiring": "base_url",
        "validated": "",
        "quirks": ROWS["codex"].quirks,
    }
    assert not listed["cursor-cli"]["usable"]
    assert "Cursor's service" in listed["cursor-cli"]["quirks"]


def test_the_drawn_list_names_every_agent():
    drawn = list_agents(as_json=False)
    assert all(name in drawn for name in agent_names())
