"""Load settings: defaults, then one TOML file, then `--section.key value`.

All mistakes are reported together, each with its origin. Relative paths are relative to the current directory, not to
the TOML file. `Provenance` records which settings the user set explicitly: a backend may ignore a default, never a
value that somebody wrote.
"""

import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dotenv import load_dotenv
from pydantic import ValidationError

from dockyard.config import Config, GRPOConfig, RunConfig, TasksConfig
from dockyard.errors import UsageError
from dockyard.settings.messages import SettingProblem, SettingsError, explain, raise_if_any, unknown_setting
from dockyard.settings.overrides import apply_overrides, forget
from dockyard.settings.text import settings_by_key, toml_value

_EMBEDDED_ONLY = ("engine.max_batch", "engine.prefix_cache_mb", "engine.kv_cache_gb", "engine.deterministic")
_OF_ANY_DATASET = ("heldout", "repo", "ids", "limit", "heldout_share", "passes")
READ_BY_SOURCE = {
    "folder": ("train", *_OF_ANY_DATASET),
    "demo": ("num_train", "num_heldout", "passes"),
    "trail": ("num_train", "num_heldout", "passes"),
    "harbor": ("dataset", "registry", *_OF_ANY_DATASET),
    "swebench": ("dataset", "split", "map", *_OF_ANY_DATASET),
    "c2bug": ("dataset", "split", "map", "repositories", "image", *_OF_ANY_DATASET),
    "recorded": ("dataset", "heldout", "passes"),
}
"""Which settings of `tasks` mean something to which source."""
_OF_LAUNCH = ("engine.command", "engine.memory_share", "engine.args")
_ADDRESS_OPTIONS = ("--host", "--port", "--uds", "--api-key", "--ssl-keyfile", "--ssl-certfile")
_SERVER_ONLY = ("engine.url", "engine.model", "engine.api_key_env", "engine.retry_s")


def load_run_config(toml: Path | None, overrides: Sequence[str], *, drop: Collection[str] = ()) -> RunConfig:
    """The settings of one run; `overrides` are words such as `--trainer.lr 1e-4`, `drop` keys to forget."""
    config = load(RunConfig, toml, overrides, drop=drop)
    raise_if_any([*_missing(config), *_without_effect(config), *_contradictory(config)])
    return config


def load[C: Config](kind: type[C], toml: Path | None, overrides: Sequence[str], *, drop: Collection[str] = ()) -> C:
    """Settings of any kind, from their defaults, a file and the command line."""
    values = read_toml(toml) if toml else {}
    applied = apply_overrides(kind, values, overrides)
    for key in drop:
        forget(values, key)
    try:
        config = kind.model_validate(values)
    except ValidationError as error:
        found = [explain(kind, details, toml, applied.keys) for details in error.errors(include_url=False)]
        raise SettingsError([*applied.problems, *found]) from None
    raise_if_any(applied.problems)
    return config


def anchored(config: RunConfig) -> RunConfig:
    """The same settings with absolute paths, so that they mean the same from any directory."""
    paths = {name: getattr(config.tasks, name) for name in ("train", "heldout", "registry", "repositories")}
    if config.tasks.dataset and (config.tasks.source == "recorded" or Path(config.tasks.dataset).exists()):
        paths["dataset"] = str(Path(config.tasks.dataset).absolute())
    tasks = config.tasks.model_copy(update={n: p.absolute() if isinstance(p, Path) else p for n, p in paths.items()})
    slime = {name: getattr(config.slime, name) for name in ("checkout", "megatron", "converted")}
    update: dict[str, Any] = {
        "tasks": tasks,
        "run_dir": config.run_dir.absolute(),
        "slime": config.slime.model_copy(update={n: p.absolute() for n, p in slime.items() if p}),
    }
    if config.prime_rl.checkout:
        update["prime_rl"] = config.prime_rl.model_copy(update={"checkout": config.prime_rl.checkout.absolute()})
    model_dir = Path(config.model.name)
    if model_dir.is_dir():
        update["model"] = config.model.model_copy(update={"name": str(model_dir.absolute())})
    return config.model_copy(update=update)


def changed_keys(old: Config, new: Config) -> list[str]:
    """The dotted keys in which two settings differ."""
    return [key for key in settings_by_key(type(old)) if value_at(old, key) != value_at(new, key)]


def value_at(config: Config, key: str) -> Any:
    """The value of a setting, by its dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)  # the key comes from the fields of this very class
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """What a file of settings says, before anything is checked."""
    hint = "`dockyard train RUN.toml` takes a TOML file; `dockyard train --resume RUN_DIR` continues a run"
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"`{path}` does not exist", hint=hint) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"`{path}` is not UTF-8 text (byte {error.start})", hint="save it as UTF-8") from None
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {error.strerror}", hint=hint) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"`{path}` is not valid TOML: {_with_position(str(error), text)}",
            hint="text needs quotes, true and false are lower case; `dockyard train --dry-run` shows a valid file",
        ) from None


def _with_position(message: str, text: str) -> str:
    """The parser says `(at end of document)` where a line and a column help more."""
    lines = text.split("\n")
    return message.replace("(at end of document)", f"(at line {len(lines)}, column {len(lines[-1]) + 1})")


def _missing(config: RunConfig) -> list[SettingProblem]:
    """Settings that others make necessary. Not a validator: `RunConfig()` is where the defaults are read from."""
    found: list[SettingProblem] = []
    if config.tasks.source == "folder" and config.tasks.train is None:
        found.append(
            SettingProblem(
                "`tasks.train` is not set, and `tasks.source` is `folder`",
                "`--tasks.train DIR` names a folder of Harbor tasks; `--tasks.source demo` generates small ones",
            )
        )
    if config.tasks.source == "recorded" and config.tasks.dataset is None:
        found.append(
            SettingProblem(
                "`tasks.dataset` is not set, and `tasks.source` is `recorded`",
                "`--tasks.dataset PATH` names a Harbor job, a run of ours or a file of samples",
            )
        )
    if config.engine.type != "transformers" and config.engine.url is None and not config.engine.launch:
        found.append(
            SettingProblem(
                f"`engine.url` is not set, and `engine.type` is `{config.engine.type}`",
                "`--engine.url http://localhost:8000` names a server; `--engine.type vllm --engine.launch true` starts "
                "one; `--engine.type transformers` needs none",
            )
        )
    if config.grpo.overlong == "penalty" and config.grpo.overlong_length is None:
        found.append(
            SettingProblem(
                "`grpo.overlong_length` is not set, and `grpo.overlong` is `penalty`",
                "`--grpo.overlong_length 20000`: the sampled tokens from which on a rollout has lost a whole point",
            )
        )
    return found


def _without_effect(config: RunConfig) -> list[SettingProblem]:
    """Settings that were changed and that the others make meaningless."""
    changed = changed_keys(RunConfig(), config)
    return [
        SettingProblem(f"`{key}` has no effect when {when}", f"remove `{key}`, or change the other setting")
        for when, keys in _ignored(config).items()
        for key in keys
        if key in changed
    ]


def _contradictory(config: RunConfig) -> list[SettingProblem]:
    found = [
        SettingProblem(
            f"`engine.args` has `{option}`, but the run decides how the server that it starts is reached",
            "remove it; to ask a server of your own, `--engine.launch false --engine.url http://HOST:PORT`",
        )
        for option in (word.partition("=")[0].replace("_", "-") for word in config.engine.args)
        if option in _ADDRESS_OPTIONS
    ]
    length, buffer = config.grpo.overlong_length, config.grpo.overlong_buffer
    if length is not None and buffer is not None and buffer > length:
        found.append(
            SettingProblem(
                f"`grpo.overlong_buffer` is {buffer}, more than `grpo.overlong_length`, which is {length}",
                "the reward begins to fall so many tokens before that length: make it shorter",
            )
        )
    return found


def _ignored(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """Under which of this run's circumstances which settings are not read."""
    agent, tasks, engine = config.agent.name, config.tasks, config.engine
    circumstances = {
        f"`tasks.source` is `{tasks.source}`": (True, _not_read(tasks.source)),
        "`tasks.heldout` is set": (tasks.heldout is not None, ("tasks.heldout_share",)),
        "no tasks are held out": (
            not tasks.holds_out,
            ("eval.samples", "eval.every", "sampling.eval_temperature", "trainer.keep_best"),
        ),
        "`eval.every` is 0": (config.eval.every == 0, ("trainer.keep_best",)),
        "passes are counted": (config.counts_passes, ("steps",)),
        f"`agent.name` is `{agent}`": (agent in ("oracle", "nop") or ":" in agent, ("agent.max_turns",)),
        "`environment.type` is `sandbox`": (config.environment.type == "sandbox", ("environment.cpus",)),
        "`environment.type` is `docker`": (config.environment.type == "docker", ("environment.storage_mb",)),
        "`engine.deterministic` is true": (
            engine.type == "transformers" and engine.deterministic,
            ("engine.max_batch", "engine.prefix_cache_mb"),
        ),
        f"`engine.type` is `{engine.type}`": (
            True,
            (
                *(_EMBEDDED_ONLY if engine.type != "transformers" else _SERVER_ONLY),
                *(("engine.launch",) if engine.type != "vllm" else ()),
            ),
        ),
        "`engine.launch` is true": (engine.launch, ("engine.url", "engine.model", "engine.api_key_env")),
        "`engine.launch` is false": (not engine.launch, _OF_LAUNCH),
        "`trainer.method` is `full`": (config.trainer.method == "full", ("trainer.lora_r", "trainer.lora_alpha")),
        "`model.device` is `cpu`": (config.model.device == "cpu", ("trainer.compile", "trainer.offload")),
        **_ignored_by_the_loss(config.grpo),
    }
    return {when: keys for when, (holds, keys) in circumstances.items() if holds}


def _ignored_by_the_loss(grpo: GRPOConfig) -> dict[str, tuple[bool, tuple[str, ...]]]:
    return {
        f"`grpo.aggregation` is `{grpo.aggregation}`": (grpo.aggregation != "constant", ("grpo.constant_length",)),
        # Corrected, the ratio is to the present weights, and so 1: there is nothing to clip.
        f"`grpo.correction` is `{grpo.correction}`": (
            True,
            ("grpo.correction_cap",)
            if grpo.correction == "none"
            else ("grpo.ratio", "grpo.clip_low", "grpo.clip_high"),
        ),
        "`grpo.kl_coef` is 0": (grpo.kl_coef == 0, ("grpo.kl_type",)),
        f"`grpo.overlong` is `{grpo.overlong}`": (
            grpo.overlong != "penalty",
            ("grpo.overlong_length", "grpo.overlong_buffer"),
        ),
        "`grpo.dynamic_sampling` is true": (grpo.dynamic_sampling, ("grpo.zero_variance",)),
        "`grpo.dynamic_sampling` is false": (not grpo.dynamic_sampling, ("grpo.max_tries",)),
    }


def _not_read(source: str) -> tuple[str, ...]:
    others = TasksConfig.model_fields.keys() - {"source", *READ_BY_SOURCE[source]}
    found = tuple(f"tasks.{name}" for name in sorted(others))
    return (*found, "grpo.max_tries") if source == "recorded" else found


def read_dotenv() -> None:
    """Put them into the environment. What is set already stays."""
    file = Path.cwd() / ".env"
    try:
        load_dotenv(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"`{file}` cannot be read: {error}", hint="it holds lines such as `NAME=value`") from error


@dataclass(frozen=True, slots=True)
class Provenance:
    """The written settings of a run."""

    places: dict[str, str]
    """Dotted key -> `in `run.toml`` or `on the command line`."""

    def without(self, drop: Collection[str]) -> "Provenance":
        """The others. An error if one of those to drop is none, or was not written."""
        problems: list[SettingProblem] = []
        for key in drop:
            if key not in settings_by_key(RunConfig):
                problems.append(unknown_setting(RunConfig, key, spelled=f"`{key}` in `--drop`", prefix=""))
            elif key not in self.places:
                problems.append(SettingProblem(f"`{key}` in `--drop` is written nowhere", "leave it out of `--drop`"))
        raise_if_any(problems)
        return Provenance({key: place for key, place in self.places.items() if key not in drop})


def written_settings(toml: Path | None, overrides: Sequence[str]) -> Provenance:
    """What a file and the command line say. Mistakes among them are for `load_run_config` to find."""
    places = dict.fromkeys(_keys(read_toml(toml)), f"in `{toml}`") if toml else {}
    said: dict[str, Any] = {}
    apply_overrides(RunConfig, said, overrides)
    return Provenance(places | dict.fromkeys(_keys(said), "on the command line"))


def setting_text(config: Config, key: str) -> str:
    """The value of a setting as TOML has it."""
    value = value_at(config, key)
    return "none" if value is None else toml_value(value)


def _keys(values: dict[str, Any]) -> list[str]:
    return [key for key in settings_by_key(RunConfig) if _holds(values, key.split("."))]


def _holds(values: dict[str, Any], parts: Sequence[str]) -> bool:
    if parts[0] not in values:
        return False
    inner = values[parts[0]]
    return len(parts) == 1 or (isinstance(inner, dict) and _holds(cast(dict[str, Any], inner), parts[1:]))
