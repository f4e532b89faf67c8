"""The settings of `dockyard serve`, and the checks of combinations.

They are read by the same loader as those of a run: defaults, a TOML file, `--section.key value`. The short flags are
aliases of settings. Keys are not settings, so that no settings file contains them.
"""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field

from dockyard.config import Config, EngineConfig, ModelConfig
from dockyard.errors import DockyardError, UsageError
from dockyard.settings.messages import SettingProblem, raise_if_any
from dockyard.settings.rules import Ignored, ignored_by_engine, without_effect

KEY_VARIABLE = "DOCKYARD_API_KEY"
TOKEN_VARIABLE = "DOCKYARD_ADMIN_TOKEN"
ALIASES = {
    "--max-new-tokens": "max_new_tokens",
    "--admin-port": "admin_port",
    "--admin-socket": "admin_socket",
    "--dtype": "model.dtype",
    "--device": "model.device",
    "--engine": "engine.type",
    "--engine-url": "engine.url",
    "--engine-model": "engine.model",
    "--engine-api-key-env": "engine.api_key_env",
    "--context-length": "engine.context_length",
}
LAUNCH_SETTINGS = ("engine.launch", "engine.command", "engine.memory_share", "engine.args")
"""`dockyard serve` starts no vLLM server, so it does not read these."""


class ServeConfig(Config):
    """What `dockyard serve` serves, and where."""

    help_command: ClassVar[str] = "dockyard serve --help"

    host: str = "127.0.0.1"
    """Address to listen on. `0.0.0.0` accepts connections from other machines."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on. 0 picks a free port."""
    adapter: Path | None = None
    """A LoRA adapter to serve the model with."""
    temperature: float = Field(default=1.0, ge=0, le=2)
    """Temperature for requests that do not set one."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in one answer. None: what fits into the context."""
    admin_port: int | None = Field(default=None, ge=0, le=65535)
    """Also listen on this port of 127.0.0.1 for a trainer that loads adapters. Its token is $DOCKYARD_ADMIN_TOKEN, or a
    new one that is printed."""
    admin_socket: Path | None = None
    """Listen for a trainer on this unix socket instead of a port."""
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()

    @property
    def has_admin(self) -> bool:
        """Whether a trainer can load adapters."""
        return self.admin_port is not None or self.admin_socket is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A key that clients must send."""

    value: str
    shown: str
    """What may be printed: the key itself if it was generated now, else where it comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The checked settings of a server, and its keys."""

    config: ServeConfig
    key: Secret | None
    """None accepts any key."""
    admin_token: Secret | None
    """None if there is no admin listener."""

    @property
    def served_name(self) -> str:
        """The model's name for clients: its Hub name, or the name of its folder."""
        name = self.config.model.name
        return Path(name).name if name.startswith((".", "/", "~")) or name.count("/") > 1 else name

    @classmethod
    def of(
        cls,
        config: ServeConfig,
        *,
        api_key: str | None = None,
        no_auth: bool = False,
        environment: Mapping[str, str] = os.environ,
    ) -> Self:
        """Check the settings together, and find the keys."""
        raise_if_any(serve_problems(config))
        _refuse_contradictions(config, api_key=api_key, no_auth=no_auth)
        key = None if no_auth else _api_key(api_key, environment)
        token = _from_environment(TOKEN_VARIABLE, environment) if config.has_admin else None
        if key and token and key.value == token.value:
            raise UsageError("the API key and the admin token are the same", hint=f"set another `{TOKEN_VARIABLE}`")
        return cls(config=config, key=key, admin_token=token)


def serve_problems(config: ServeConfig) -> list[SettingProblem]:
    """Return the settings that are missing, or that have no effect because of others."""
    found = without_effect(config, _ignored(config), {key: flag for flag, key in ALIASES.items()})
    if config.engine.type != "transformers" and config.engine.url is None:
        message = f"`--engine {config.engine.type}` needs the URL of a server, and `engine.url` is not set"
        found.append(SettingProblem(message, "`--engine-url http://localhost:8000` names the server"))
    return found


def _ignored(config: ServeConfig) -> Ignored:
    by_engine = ignored_by_engine(config.engine.model_copy(update={"launch": False}))
    ignored = {when: tuple(key for key in keys if key not in LAUNCH_SETTINGS) for when, keys in by_engine.items()}
    ignored["a model is served: `dockyard serve` starts no vLLM server"] = LAUNCH_SETTINGS
    if config.engine.type != "transformers":
        ignored[f"`--engine` is `{config.engine.type}`: the server decides it"] = ("model.dtype", "model.device")
    return ignored


def _refuse_contradictions(config: ServeConfig, *, api_key: str | None, no_auth: bool) -> None:
    if no_auth and api_key:
        raise UsageError("`--no-auth` cannot be combined with `--api-key`", hint="remove one of them")
    if no_auth and config.has_admin:
        hint = "use `--api-key`: the key of a session must stop working when the session is closed"
        raise UsageError("`--no-auth` cannot be combined with an admin listener", hint=hint)
    if config.admin_port is not None and config.admin_socket:
        raise UsageError("`--admin-port` cannot be combined with `--admin-socket`", hint="remove one of them")
    if config.adapter and not (config.adapter / "adapter_config.json").is_file():
        hint = "name a folder that PEFT's `save_pretrained` wrote"
        raise DockyardError(f"`{config.adapter}` has no `adapter_config.json`", hint=hint)


def _api_key(given: str | None, environment: Mapping[str, str]) -> Secret:
    """Return the key from the command line or the environment, or a new one."""
    if given is None:
        return _from_environment(KEY_VARIABLE, environment)
    if not given.strip():
        raise UsageError("`--api-key` is empty", hint="`--no-auth` accepts any key")
    return Secret(value=given.strip(), shown="<--api-key>")


def _from_environment(variable: str, environment: Mapping[str, str]) -> Secret:
    if value := environment.get(variable, "").strip():
        return Secret(value=value, shown=f"${variable}")
    made = secrets.token_urlsafe(16)
    return Secret(value=made, shown=made)
