"""The command line of `dockyard serve`, and what it must not say. Imports nothing heavy: every verb's help needs it."""

import argparse
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from dockyard.config import EngineConfig, ModelConfig
from dockyard.errors import DockyardError, UsageError

KEY_VARIABLE = "DOCKYARD_API_KEY"
TOKEN_VARIABLE = "DOCKYARD_ADMIN_TOKEN"

_EPILOG = """sampling:
  A client's temperature, seed and max_tokens count. These have no effect, and the log says so once per name:
  top_p, top_k, min_p, frequency_penalty, presence_penalty, repetition_penalty, logit_bias, stop, stop_sequences,
  top_logprobs, tool_choice (unless `auto`), response_format (unless `text`).
  Logprobs are those of the distribution a token was drawn from, so at temperature 0 they are all 0.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A key that clients must know."""

    value: str
    shown: str
    """How it may be printed: itself if it was made up just now, else where it comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminOptions:
    """Where the admin listener is."""

    port: int | None
    socket: Path | None
    token: Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What to serve, and to whom."""

    model: ModelConfig
    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    key: Secret | None
    """None lets everybody in."""
    admin: AdminOptions | None = None
    adapter: Path | None = None
    temperature: float = 1.0
    """For clients that ask for none."""
    max_new_tokens: int | None = None

    @property
    def served_name(self) -> str:
        """What clients call the model: its name on the Hub, or its folder's."""
        name = self.model.name
        return Path(name).name if name.startswith((".", "/", "~")) or name.count("/") > 1 else name

    @classmethod
    def of(cls, arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Self:
        """What the command line says, refused where it contradicts itself."""
        words = vars(arguments)
        _refuse_contradictions(words)
        key = None if arguments.no_auth else _secret(arguments.api_key, "--api-key", KEY_VARIABLE, environment)
        admin = _admin_options(arguments, environment)
        if key and admin and key.value == admin.token.value:
            raise UsageError("the API key and the admin token are the same", hint=f"set another `{TOKEN_VARIABLE}`")
        adapter: Path | None = arguments.adapter
        if adapter and not (adapter / "adapter_config.json").is_file():
            hint = "an adapter folder is what PEFT's `save_pretrained` writes"
            raise DockyardError(f"`{adapter}` has no `adapter_config.json`", hint=hint)
        return cls(
            model=ModelConfig(name=arguments.model, **_given(words, dtype="dtype", device="device")),
            engine=_engine_config(words),
            host=arguments.host,
            port=arguments.port,
            key=key,
            admin=admin,
            adapter=adapter,
            temperature=arguments.temperature,
            max_new_tokens=arguments.max_new_tokens,
        )


def add_serve(add_parser: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Describe the verb."""
    parser = add_parser(
        "serve",
        help="serve a model to agents",
        description="Serve a model to any agent: OpenAI Chat Completions and Responses, Anthropic Messages, with "
        "`logprobs` and `return_token_ids`.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model folder, a Hub name, or `smollm2-135m`")
    add("--host", default="127.0.0.1", metavar="HOST", help="address to listen on (default: %(default)s)")
    add("--port", default=8000, type=_port, metavar="N", help="0 takes a free one (default: %(default)s)")
    add("--api-key", metavar="KEY", help=f"what clients must send (default: ${KEY_VARIABLE}, or a new one, printed)")
    add("--no-auth", action="store_true", help="accept any key, and none")
    add("--temperature", default=1.0, type=_temperature, metavar="T", help="when a client sends none (default: 1)")
    add("--max-new-tokens", type=_positive, metavar="N", help="upper limit on one answer (default: the context)")
    add("--context-length", type=_positive, metavar="N", help="prompt and answer together (default: the model's)")
    add("--adapter", type=Path, metavar="DIR", help="a LoRA adapter to serve the model with")
    add("--dtype", choices=("auto", "float32", "bfloat16"), help="of the embedded engine's weights")
    add("--device", choices=("auto", "cpu", "cuda"), help="of the embedded engine")
    add("--engine", choices=("transformers", "vllm", "sglang", "openai"), default="transformers")
    add("--engine-url", metavar="URL", help="of a vLLM, SGLang or OpenAI-compatible server to stand in front of")
    add("--engine-model", metavar="NAME", help="the model's name there (default: the only one it lists)")
    add("--engine-api-key-env", metavar="NAME", help="the environment variable with that server's key")
    add("--admin-port", type=_port, metavar="N", help=f"listen for a trainer on 127.0.0.1, with ${TOKEN_VARIABLE}")
    add("--admin-socket", type=Path, metavar="PATH", help="the same on a unix socket")
    return parser


_RUN_FILE_NAMES = {
    "--engine.type": "--engine",
    "--engine.url": "--engine-url",
    "--engine.model": "--engine-model",
    "--engine.api_key_env": "--engine-api-key-env",
    "--engine.context_length": "--context-length",
    "--model.device": "--device",
}


def as_flag(word: str) -> str:
    """Hints of engines name settings of a run file; here they are these flags."""
    name, equals, value = word.partition("=")
    return _RUN_FILE_NAMES.get(name, name) + equals + value


def _refuse_contradictions(words: dict[str, Any]) -> None:
    embedded = words["engine"] == "transformers"
    if not embedded and not words["engine_url"]:
        hint = "`--engine-url http://localhost:8000` names the server"
        raise UsageError(f"`--engine {words['engine']}` needs the server's address", hint=hint)
    ignored = ("engine_url", "engine_model", "engine_api_key_env") if embedded else ("dtype", "device")
    for name in ignored:
        if words[name] is not None:
            flag = f"--{name.replace('_', '-')}"
            hint = "`--engine vllm`, `sglang` or `openai`" if embedded else "the server decides that"
            raise UsageError(f"`{flag}` has no effect with `--engine {words['engine']}`", hint=hint)
    if words["no_auth"] and words["api_key"]:
        raise UsageError("`--no-auth` does not go with `--api-key`", hint="leave one out")
    if words["no_auth"] and (words["admin_port"] is not None or words["admin_socket"]):
        hint = "use `--api-key`: a session's key must stop working when the session is closed"
        raise UsageError("`--no-auth` does not go with an admin listener", hint=hint)
    if words["admin_port"] is not None and words["admin_socket"]:
        raise UsageError("`--admin-port` does not go with `--admin-socket`", hint="leave one out")


def _admin_options(arguments: argparse.Namespace, environment: Mapping[str, str]) -> AdminOptions | None:
    if arguments.admin_port is None and arguments.admin_socket is None:
        return None
    token = _secret(None, "", TOKEN_VARIABLE, environment)
    return AdminOptions(port=arguments.admin_port, socket=arguments.admin_socket, token=token)


def _engine_config(words: dict[str, Any]) -> EngineConfig:
    fields = _given(
        words, url="engine_url", model="engine_model", api_key_env="engine_api_key_env", context_length="context_length"
    )
    try:
        return EngineConfig(type=words["engine"], **fields)
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0]) if problem["loc"] else "engine"
        flag = {"context_length": "--context-length", "type": "--engine"}.get(name, f"--engine-{name}")
        hint = f"{problem['msg']}; `dockyard serve --help` says how it is used"
        raise UsageError(f"`{flag}` is `{problem['input']}`", hint=hint) from error


def _given(words: dict[str, Any], **names: str) -> dict[str, Any]:
    return {field: words[name] for field, name in names.items() if words[name] is not None}


def _secret(given: str | None, flag: str, variable: str, environment: Mapping[str, str]) -> Secret:
    """From the command line, else the environment, else made up."""
    if given is not None:
        if not given.strip():
            raise UsageError(f"`{flag}` is empty", hint="`--no-auth` accepts any key")
        return Secret(value=given.strip(), shown=f"<{flag}>")
    if value := environment.get(variable, "").strip():
        return Secret(value=value, shown=f"${variable}")
    made = secrets.token_urlsafe(16)
    return Secret(value=made, shown=made)


def _port(word: str) -> int:
    return _number(word, 0, 65535)


def _positive(word: str) -> int:
    return _number(word, 1, 2**31 - 1)


def _number(word: str, least: int, most: int) -> int:
    if not (word.isdecimal() and least <= int(word) <= most):
        raise argparse.ArgumentTypeError(f"`{word}` is no whole number from {least} to {most}")
    return int(word)


def _temperature(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"`{word}` is no number from 0 to 2")
    return value
