"""Load settings: defaults, then one TOML file, then the command line or the arguments of a Python function.

All mistakes are reported together, each with its origin. Relative paths are relative to the current directory, not to
the TOML file. `Provenance` records which settings the user set explicitly: a backend may ignore a default, but never a
value that the user wrote.
"""

import tomllib
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from dotenv import load_dotenv
from pydantic import ValidationError

from dockyard.config import Config, RunConfig
from dockyard.errors import UsageError
from dockyard.settings.messages import SettingProblem, SettingsError, explain, raise_if_any, unknown_setting
from dockyard.settings.overrides import Overrides, forget, read_overrides, setting_of
from dockyard.settings.rules import run_problems
from dockyard.settings.text import settings_by_key, toml_value, value_at


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A settings file that has been read, to load it several times."""

    path: Path
    values: dict[str, Any]
    """Its content, before validation."""

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(path, read_toml(path))


def load_run_config(
    toml: Path | SettingsFile | None, overrides: Sequence[str] | Overrides, *, drop: Collection[str] = ()
) -> RunConfig:
    """Load the settings of one run. `overrides` are words such as `--trainer.lr 1e-4`; keys in `drop` are ignored."""
    config = load(RunConfig, toml, overrides, drop=drop)
    raise_if_any(run_problems(config))
    return config


def load[C: Config](
    kind: type[C],
    toml: Path | SettingsFile | None,
    overrides: Sequence[str] | Overrides,
    *,
    drop: Collection[str] = (),
) -> C:
    """Load settings of any kind from their defaults, a file and what overrides it."""
    given = read_overrides(kind, overrides)
    file = SettingsFile.read(toml) if isinstance(toml, Path) else toml
    values = deepcopy(file.values) if file else {}
    given.apply_to(values)
    for key in drop:
        forget(values, key)
    try:
        config = kind.model_validate(values)
    except ValidationError as error:
        found = [
            explain(kind, found, lambda key: _spell(key, file, given)) for found in error.errors(include_url=False)
        ]
        raise SettingsError([*given.problems, *found]) from None
    raise_if_any(given.problems)
    return config


def _spell(key: str, file: SettingsFile | None, overrides: Overrides) -> str:
    """How the user wrote a setting, and where."""
    flags = [patch.spell(key) for other, patch in overrides.assignments() if _overlap(key, other)]
    if flags:
        return flags[-1]
    return f"`{key}` in `{file.path}`" if file else f"`{key}`"


def _overlap(key: str, other: str) -> bool:
    """Whether one key is the other, or holds it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


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


def read_toml(path: Path) -> dict[str, Any]:
    """The values in a settings file, before validation."""
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
    """Replace the parser's `(at end of document)` by a line and a column."""
    lines = text.split("\n")
    return message.replace("(at end of document)", f"(at line {len(lines)}, column {len(lines[-1]) + 1})")


def read_dotenv() -> None:
    """Add the variables in `.env` to the environment. Variables that are already set keep their values."""
    file = Path.cwd() / ".env"
    try:
        load_dotenv(file)
    except (OSError, UnicodeDecodeError) as error:
        hint = "write one `NAME=value` per line, as UTF-8"
        raise UsageError(f"`{file}` cannot be read: {error}", hint=hint) from error


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which settings the user wrote, and where."""

    places: dict[str, str]
    """Dotted key -> `in `run.toml`` or `on the command line`."""

    def without(self, drop: Collection[str]) -> "Provenance":
        """Leave out these settings. It is an error to drop what is not a setting or was not written."""
        problems: list[SettingProblem] = []
        for key in drop:
            if key not in settings_by_key(RunConfig):
                problems.append(unknown_setting(RunConfig, key, spelled=f"`{key}` in `--drop`", prefix=""))
            elif key not in self.places:
                message = f"`{key}` in `--drop` is not set in the file or on the command line"
                problems.append(SettingProblem(message, f"remove `{key}` from `--drop`"))
        raise_if_any(problems)
        return Provenance({key: place for key, place in self.places.items() if key not in drop})


def written_settings(
    toml: Path | None, overrides: Sequence[str] | Overrides, kind: type[Config] = RunConfig
) -> Provenance:
    """Find out which settings a file and the command line set. `load` reports their mistakes."""
    known = settings_by_key(kind)
    places = dict.fromkeys(_keys(known, read_toml(toml)), f"in `{toml}`") if toml else {}
    said = {setting_of(known, key) for key, _ in read_overrides(kind, overrides).assignments()}
    return Provenance(places | dict.fromkeys((key for key in known if key in said), "on the command line"))


def setting_text(config: Config, key: str) -> str:
    """The value of a setting as it is written in TOML."""
    value = value_at(config, key)
    return "none" if value is None else toml_value(value)


def _keys(known: Collection[str], values: dict[str, Any]) -> list[str]:
    return [key for key in known if _holds(values, key.split("."))]


def _holds(values: dict[str, Any], parts: Sequence[str]) -> bool:
    if parts[0] not in values:
        return False
    inner = values[parts[0]]
    return len(parts) == 1 or (isinstance(inner, dict) and _holds(cast(dict[str, Any], inner), parts[1:]))
