"""Write docs/reference from docstrings, settings and the help of the command line: `python tools/reference.py`.

With `--check`, only report the files that are not current.
"""

import argparse
import ast
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))  # this checkout's, not an installed one

import dockyard  # noqa: E402
from dockyard.cli import main as dockyard_command  # noqa: E402
from dockyard.config import RunConfig  # noqa: E402
from dockyard.settings.text import settings_help  # noqa: E402

WIDTH = 100
COMMAND = "python tools/reference.py"
NOTE = f"<!-- Written by `{COMMAND}`. Edit the docstrings, not this file. -->\n"
FUNCTIONS = ("train", "run_rollouts", "evaluate", "convert_job", "load_run")


def api() -> str:
    """Return the reference of `import dockyard`."""
    usage, _, about = (dockyard.__doc__ or "").partition("\n\n")[2].rpartition("\n\n")
    classes = [name for name in dockyard.__all__ if name not in (*FUNCTIONS, "__version__")]
    example = textwrap.dedent(usage).strip()
    parts = [f"{NOTE}\n# Python API\n\n```python\n{example}\n```\n\n{about.strip()}\n\n{_about_calls()}"]
    parts += [_function(name) for name in FUNCTIONS]
    parts += [_class(name) for name in classes]
    return "\n\n".join(parts) + "\n"


def _about_calls() -> str:
    from dockyard import api as module

    return inspect.cleandoc(module.__doc__ or "").partition("\n\n")[2]


def _function(name: str) -> str:
    node, source = _parsed(name)
    assert isinstance(node, ast.FunctionDef)
    return f"## dockyard.{name}\n\n{_signature(node, source)}\n\n{ast.get_docstring(node) or ''}"


def _class(name: str) -> str:
    if name == "RunConfig":
        return "## dockyard.RunConfig\n\nThe settings of a run. [settings.md](settings.md) lists them."
    node, source = _parsed(name)
    assert isinstance(node, ast.ClassDef)
    members = "\n".join(_members(node, source))
    return f"## dockyard.{name}\n\n{ast.get_docstring(node) or ''}\n\n{members}".rstrip()


def _members(node: ast.ClassDef, source: str) -> Iterator[str]:
    for place, member in enumerate(node.body):
        if isinstance(member, ast.AnnAssign) and not _is_private(ast.unparse(member.target)):
            default = f" = {ast.unparse(member.value)}" if isinstance(member.value, ast.Constant) else ""
            shown = f"{ast.unparse(member.target)}: {ast.unparse(member.annotation)}{default}"
            yield _item(shown, _doc_below(node, place))
        elif (
            isinstance(member, ast.FunctionDef) and not _is_private(member.name) and not _decorated(member, "overload")
        ):
            is_property = _decorated(member, "property") or _decorated(member, "cached_property")
            returns = ast.unparse(member.returns) if member.returns else ""
            shown = f"{member.name}: {returns}" if is_property else _on_one_line(member, source)
            yield _item(shown, ast.get_docstring(member) or "")


def _item(shown: str, doc: str) -> str:
    return f"- `{_unquoted(shown)}`\n" + textwrap.indent(f"\n{doc}\n" if doc else "", "  ")


def _doc_below(node: ast.ClassDef, place: int) -> str:
    following = node.body[place + 1] if place + 1 < len(node.body) else None
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return inspect.cleandoc(str(following.value.value))
    return ""


def _decorated(node: ast.FunctionDef, name: str) -> bool:
    return any(ast.unparse(decorator) == name for decorator in node.decorator_list)


def _is_private(name: str) -> bool:
    return name.startswith("_")


def _parsed(name: str) -> tuple[ast.stmt, str]:
    source = textwrap.dedent(inspect.getsource(getattr(dockyard, name)))
    return ast.parse(source).body[0], source


def _signature(node: ast.FunctionDef, source: str) -> str:
    """Return the lines before the body, as they are formatted in the source."""
    lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
    return _unquoted("```python\n" + "\n".join(lines).removesuffix(":") + "\n```")


def _on_one_line(node: ast.FunctionDef, source: str) -> str:
    lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
    text = " ".join(line.strip() for line in lines).removesuffix(":").removeprefix("def ")
    return text.replace("( ", "(").replace(",)", ")").replace(" )", ")").replace("(self, ", "(").replace("(self)", "()")


def _unquoted(text: str) -> str:
    """Remove the quotes around annotations."""
    return re.sub(r'(: |-> )"([^"]*)"', r"\1\2", text)


def settings() -> str:
    """Return the list of settings, one chapter per section."""
    parts = [
        f"{NOTE}\n# Settings\n\nIn a TOML file under `[section]`, on the command line as `--section.key VALUE`, in\n"
        "Python as keyword arguments of [`dockyard.train`](api.md)."
    ]
    top, *sections = settings_help(RunConfig, WIDTH).split("\n\n[")
    parts.append(f"## Run\n\n```text\n{top}\n```")
    for section in sections:
        heading, _, lines = section.partition("\n")
        name, _, about = heading.partition("] ")
        parts.append(f"## {name.rstrip(']')}\n\n{about}\n\n```text\n{lines.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def cli() -> str:
    """Return the help of every command."""
    parts = [f"{NOTE}\n# Command line\n\n```text\n{_help([])}\n```"]
    parts += [f"## {' '.join(['dockyard', *words])}\n\n```text\n{_help(words)}\n```" for words in _commands([])]
    return "\n\n".join(parts) + "\n"


def _commands(words: list[str]) -> Iterator[list[str]]:
    for name in re.findall(r"^    ([a-z][\w-]*)(?:\s|$)", _help(words), re.MULTILINE):
        yield [*words, name]
        yield from _commands([*words, name])


def _help(words: list[str]) -> str:
    """Return the help of a command, without the list of settings that settings.md has."""
    output = StringIO()
    try:
        with redirect_stdout(output):
            dockyard_command([*words, "--help"])
    except SystemExit:
        pass
    first_setting = settings_help(RunConfig, WIDTH).splitlines()[0].split()[0]
    text, found, _ = output.getvalue().partition(f"\n  {first_setting} ")
    return text.rstrip() + ("\n\n  (listed in settings.md)" if found else "")


def main() -> int:
    """Write the files, or report those that are not current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is not current")
    check: bool = parser.parse_args().check
    os.environ |= {"COLUMNS": str(WIDTH + 2), "NO_COLOR": "1"}  # argparse keeps two columns free
    folder, stale = ROOT / "docs" / "reference", False
    folder.mkdir(exist_ok=True)
    for name, text in {"api.md": api(), "settings.md": settings(), "cli.md": cli()}.items():
        file = folder / name
        if file.exists() and file.read_text() == text:
            continue
        stale = True
        if not check:
            file.write_text(text)
        print(f"docs/reference/{name} {f'is not current: run `{COMMAND}`' if check else 'was written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
