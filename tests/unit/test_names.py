"""One name for one thing: no two public classes have the same name."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "dockyard"
ALLOWED: set[str] = set()


def classes_by_name(package: Path) -> dict[str, list[str]]:
    """Where each public class name is defined."""
    found: dict[str, list[str]] = {}
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(f"{file.relative_to(package)}:{node.lineno}")
    return found


def repeated(package: Path) -> list[str]:
    """Each name that several classes have, with where they are."""
    return [f"{name}: {', '.join(where)}" for name, where in classes_by_name(package).items() if len(where) > 1]


def test_no_two_classes_have_the_same_name():
    assert [line for line in repeated(PACKAGE) if line.partition(":")[0] not in ALLOWED] == []


def test_every_exception_to_the_rule_is_needed():
    assert {line.partition(":")[0] for line in repeated(PACKAGE)} == ALLOWED


def test_the_check_sees_a_name_that_is_used_twice(tmp_path: Path):
    (tmp_path / "a.py").write_text("class Row: ...\nclass _Row: ...\nclass Column: ...\n")
    (tmp_path / "b.py").write_text("def make():\n    class Row: ...\nclass _Row: ...\n")
    assert repeated(tmp_path) == ["Row: a.py:1, b.py:2"]
