"""The four files that a user may replace, with `{{ name }}` where a value goes."""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from dockyard.errors import UsageError

TEMPLATE = Path(__file__).parent / "template"
FILES = ("Dockerfile", "instruction.md", "task.toml", "test.sh")
_PLACE = re.compile(r"\{\{ *(\w+) *\}\}")
_DELETE = "\x7f"


def read_template(folder: Path | None) -> dict[str, str]:
    """The files' texts by name."""
    folder = folder or TEMPLATE
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UsageError(
            f"the template `{folder}` has no `{missing[0]}`",
            hint=f"it needs {', '.join(FILES)}: `cp -rL examples/harbor/c2bug_template DIR`, and change them",
        )
    return {name: (folder / name).read_text() for name in FILES}


def fill(template: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Each file with its values: as strings in TOML, as words in shell, as they are elsewhere."""
    return {name: _fill(name, text, values) for name, text in template.items()}


def _fill(name: str, text: str, values: Mapping[str, str]) -> str:
    quote = _quote_for(name)

    def value(place: re.Match[str]) -> str:
        if place[1] not in values:
            known = ", ".join(f"`{each}`" for each in values)
            raise UsageError(f"`{name}` of the template asks for `{place[1]}`", hint=f"there are {known}")
        return quote(values[place[1]])

    return _PLACE.sub(value, text)


def _quote_for(name: str) -> Callable[[str], str]:
    if name.endswith(".toml"):
        return lambda value: json.dumps(value, ensure_ascii=False).replace(_DELETE, "\\u007f")
    return shlex.quote if name.endswith(".sh") else str
