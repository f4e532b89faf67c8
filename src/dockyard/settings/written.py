"""Which settings somebody wrote, and where: a default may be another's business, a written value is a wish."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dockyard.config import Config, RunConfig
from dockyard.settings import read_toml, value_at
from dockyard.settings.overrides import apply_overrides
from dockyard.settings.problems import Problem, raise_if_any, unknown_setting
from dockyard.settings.text import settings_by_key, toml_value


@dataclass(frozen=True, slots=True)
class Written:
    """The written settings of a run."""

    places: dict[str, str]
    """Dotted key -> `in `run.toml`` or `on the command line`."""

    def without(self, drop: Collection[str]) -> "Written":
        """The others. An error if one of those to drop is none, or was not written."""
        problems: list[Problem] = []
        for key in drop:
            if key not in settings_by_key(RunConfig):
                problems.append(unknown_setting(RunConfig, key, spelled=f"`{key}` in `--drop`", prefix=""))
            elif key not in self.places:
                problems.append(Problem(f"`{key}` in `--drop` is written nowhere", "leave it out of `--drop`"))
        raise_if_any(problems)
        return Written({key: place for key, place in self.places.items() if key not in drop})


def written_settings(toml: Path | None, overrides: Sequence[str]) -> Written:
    """What a file and the command line say. Mistakes among them are for `load_run_config` to find."""
    places = dict.fromkeys(_keys(read_toml(toml)), f"in `{toml}`") if toml else {}
    said: dict[str, Any] = {}
    apply_overrides(RunConfig, said, overrides)
    return Written(places | dict.fromkeys(_keys(said), "on the command line"))


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
