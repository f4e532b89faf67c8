"""`dockyard serve`."""

import os
from collections.abc import Mapping
from pathlib import Path

from dockyard.cli.args import DEBUG, Flag, Given, Verb
from dockyard.cli.terminal import print_data, say
from dockyard.errors import UsageError
from dockyard.process import stopped_by_signals
from dockyard.serve.options import ALIASES, KEY_VARIABLE, LAUNCH_SETTINGS, ServeConfig, ServeOptions, serve_problems
from dockyard.settings.load import load, written_settings
from dockyard.settings.messages import raise_if_any
from dockyard.settings.overrides import Patch
from dockyard.settings.text import to_toml

_NOTES = """sampling:
  A client's temperature, seed and max_tokens are used. These have no effect, and the log says so once per name:
  top_p, top_k, min_p, frequency_penalty, presence_penalty, repetition_penalty, logit_bias, stop, stop_sequences,
  top_logprobs, tool_choice (unless `auto`), response_format (unless `text`).
  Logprobs are those of the distribution that a token was sampled from, so at temperature 0 they are all 0.
"""


def _serve(given: Given) -> int:
    """Serve until a signal raises KeyboardInterrupt."""
    if given.flags.dry_run:
        config = read_config(given)
        raise_if_any(serve_problems(config))
        if config.engine.is_custom:
            from dockyard.engine.custom import check_engine

            check_engine(config.engine)
        print_data(config.model_dump_json(indent=2) + "\n" if given.flags.json else to_toml(config))
        return 0
    options = read_options(given)
    from dockyard.serve.server import serve

    with stopped_by_signals():
        serve(options, say)
    return 0


def read_options(given: Given, environment: Mapping[str, str] = os.environ) -> ServeOptions:
    """What to serve, and with which keys."""
    flags = given.flags
    return ServeOptions.of(read_config(given), api_key=flags.api_key, no_auth=flags.no_auth, environment=environment)


def read_config(given: Given) -> ServeConfig:
    """The settings of the server. MODEL is `model.name`; a name that ends in `.toml` is a settings file."""
    source: str | None = given.flags.source
    toml = Path(source) if source and source.endswith(".toml") and not Path(source).is_dir() else None
    overrides = given.overrides
    if source and not toml:
        if any(key == "model.name" for key, _ in overrides.assignments()):
            raise UsageError(f"`{source}` cannot be combined with `--model.name`", hint="remove one of them")
        overrides = overrides.after(Patch({"model.name": source}, "MODEL"))
    config = load(ServeConfig, toml, overrides)
    if "model.name" not in written_settings(toml, overrides, ServeConfig).places:
        raise UsageError("`dockyard serve` needs a model", hint="`dockyard serve smollm2-135m` serves a small one")
    return config


VERBS = (
    Verb(
        name="serve",
        about="Serve a model to any agent: OpenAI Chat Completions and Responses, and Anthropic Messages, with "
        "`logprobs` and `return_token_ids`.",
        act=_serve,
        usage="MODEL|FILE.toml [--section.key VALUE ...] [options]",
        flags=(
            Flag(
                "source",
                "a model folder, a Hub name, or `smollm2-135m`; or a TOML file with the settings below",
                {"metavar": "MODEL", "nargs": "?"},
            ),
            Flag(
                "--api-key",
                f"the key that clients must send (default: ${KEY_VARIABLE}, or a new one that is printed)",
                {"metavar": "KEY"},
            ),
            Flag("--no-auth", "accept any key, and requests without one"),
            Flag("--dry-run", "print the resolved settings as TOML, and do nothing else"),
            Flag("--json", "with `--dry-run`, print the settings as JSON"),
            DEBUG,
        ),
        notes=_NOTES.rstrip(),
        settings=ServeConfig,
        aliases=ALIASES,
        unread=LAUNCH_SETTINGS,
    ),
)
