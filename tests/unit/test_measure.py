"""The figures that `tools/measure.py` prints of a source tree."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "measure.py"
FILES = {
    "house/__init__.py": '"""A package."""\n',
    "house/door.py": '''"""A module.

It has a docstring of three lines.
"""

from house import wall


class Door:
    """A class."""

    width: int = 1
    """Of a field."""

    def open(self):
        return self._turn(wall.Brick())

    def _turn(self, brick):
        # A comment of its own.
        return brick  # not a line of its own
''',
    "house/wall.py": """
from .roof import tile


class Brick:
    pass


class Door:
    pass


class _Hidden:
    pass


def _lay():
    return tile


def _twice():
    return _lay() or _lay()
""",
    "house/roof.py": "tile = 1\n",
    "house/cellar.py": "import house.roof\nfrom house.wall import Brick\n",
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("measure", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "measure", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_files_lines_and_functions_are_counted(script: Any, tree: Path):
    figures = script.measure(tree)
    assert figures.num_files == 5
    assert figures.num_lines == sum(len(text.splitlines()) for text in FILES.values())
    assert (figures.function_median, figures.function_max) == (2, 3)
    assert figures.largest_file == "22 (house/wall.py)"


def test_docstrings_and_whole_line_comments_are_prose(script: Any, tree: Path):
    figures = script.measure(tree)
    assert figures.prose_share == pytest.approx((1 + 4 + 1 + 1 + 1) / figures.num_lines)


def test_a_module_with_one_importer_is_named_whichever_way_it_is_imported(script: Any, tree: Path):
    assert script.measure(tree).one_importer == []  # `roof` and `wall` have two, the others none
    (tree / "house" / "cellar.py").unlink()
    assert script.measure(tree).one_importer == ["house.roof", "house.wall"]


def test_a_public_class_name_with_two_definitions_is_named(script: Any, tree: Path):
    (tree / "house" / "other.py").write_text("class _Hidden:\n    pass\n")
    assert script.measure(tree).repeated_classes == {"Door": 2}


def test_private_functions_are_counted_by_how_often_their_module_uses_them(script: Any, tree: Path):
    figures = script.measure(tree)
    assert (figures.num_private, figures.num_private_once) == (3, 1)  # _turn once, _lay twice, _twice never


def test_the_path_is_what_runs_between_the_two_functions(script: Any, tree: Path):
    (tree / "house" / "walk.py").write_text(
        "from house import steps\n"
        "def before():\n    steps.ignored()\n"
        "def first():\n    steps.on_the_way()\n    last()\n    steps.after()\n"
        "def last():\n    pass\n"
    )
    names = ("ignored", "on_the_way", "after")
    (tree / "house" / "steps.py").write_text(
        "".join(f"def {name}():\n    from house.{name} import work\n    work()\n" for name in names)
    )
    for name in names:
        (tree / "house" / f"{name}.py").write_text("def work():\n    pass\n")
    program = (
        "import sys; from pathlib import Path; from measure import PathTracer; from house import walk\n"
        "tracer = PathTracer(Path(sys.argv[1], 'house'), ('walk.py', 'first'), ('walk.py', 'last'))\n"
        "with tracer:\n    walk.before(); walk.first()\n"
        "print(tracer.is_over, sorted(tracer.files))\n"
    )
    path = {"PYTHONPATH": f"{SCRIPT.parent}:{tree}"}
    done = subprocess.run([sys.executable, "-c", program, tree], capture_output=True, text=True, env=path, check=True)
    assert done.stdout == "True ['on_the_way.py', 'steps.py', 'walk.py']\n"


def test_the_command_prints_a_line_for_each_figure(tree: Path):
    done = subprocess.run([sys.executable, SCRIPT, tree], capture_output=True, text=True, check=True)
    assert "files / lines                              5 / " in done.stdout
    assert "private functions called once              1 of 3\n" in done.stdout
    assert "public class names defined more than once  1: Door ×2\n" in done.stdout


def test_a_folder_without_python_is_an_error(tmp_path: Path):
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert "has no Python files" in done.stderr
