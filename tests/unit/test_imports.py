"""Arrows point down only: who may import whom, who may import torch, and what stays free of it at run time."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A module may import those before it and its own package. `dockyard/__init__.py` holds the public names: it may import
# any of them, and nobody imports it but for the version.
ORDER = (
    "types",
    "chat_format",
    "errors",
    "cache",
    "extension",
    "process",
    "supervise",
    "config",
    "settings",
    "run_dir",
    "tasks",
    "engine",
    "gateway",
    "rollout",
    "callbacks",
    "convert",
    "collect",
    "rl",
    "trainer",
    "verbs",
    "api",
    "backends",
    "dashboard",
    "serve",
    "doctor",
    "cli",
    "__main__",
)
TORCH = {"torch", "transformers", "peft", "safetensors", "accelerate"}
TORCH_ALLOWED = (
    "convert/slime_pt*",
    "engine/embedded/*",
    "engine/torch_internals*",
    "engine/weights*",
    "rl/loss*",
    "trainer/*",
)
WITHOUT_TORCH = (
    "dockyard",
    "dockyard.api",
    "dockyard.backends.modal.launch",
    "dockyard.cli",
    "dockyard.collect.open",
    "dockyard.convert",
    "dockyard.doctor",
    "dockyard.gateway",
    "dockyard.rollout",
    "dockyard.trainer.run",
    "dockyard.verbs",
)


@dataclass(frozen=True, slots=True)
class Import:
    """One name that a file imports: `from a.b import c` is `a.b.c`, since `c` may be a module."""

    name: str
    line: int


def imports_of(file: Path, package: Path) -> Iterator[Import]:
    """Every import in a file, also those inside functions and under TYPE_CHECKING, with relative ones resolved."""
    inside = ("dockyard", *file.relative_to(package).parent.parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = inside[: len(inside) - node.level + 1] if node.level else ()
            module = ".".join((*start, *([node.module] if node.module else [])))
            yield from (Import(f"{module}.{alias.name}", node.lineno) for alias in node.names)


def part_of(file: Path, package: Path) -> str:
    """The name in ORDER that a file belongs to."""
    return file.relative_to(package).parts[0].removesuffix(".py")


def direction_violations(package: Path) -> list[str]:
    """Each import that points up, each part without a place in ORDER."""
    found: list[str] = []
    for file in sorted(package.rglob("*.py")):
        part = part_of(file, package)
        where = file.relative_to(package)
        if part == "__init__":
            continue
        if part not in ORDER:
            found.append(f"{where}: `{part}` has no place in ORDER")
            continue
        lower = {*ORDER[: ORDER.index(part)], part, "__version__"}
        for imported in imports_of(file, package):
            top, *rest = imported.name.split(".")
            if top == "dockyard" and (not rest or rest[0] not in lower):
                found.append(f"{where}:{imported.line}: `{part}` may not import `{imported.name}`")
    return found


def torch_violations(package: Path) -> list[str]:
    """Each import of torch and its kin outside the files that are allowed to."""
    return [
        f"{file.relative_to(package)}:{imported.line}: imports `{imported.name}`"
        for file in sorted(package.rglob("*.py"))
        if not any(fnmatch(file.relative_to(package).as_posix(), allowed) for allowed in TORCH_ALLOWED)
        for imported in imports_of(file, package)
        if imported.name.split(".")[0] in TORCH
    ]


def test_our_arrows_point_down_only():
    assert direction_violations(ROOT / "src" / "dockyard") == []


def test_torch_is_imported_only_where_allowed():
    assert torch_violations(ROOT / "src" / "dockyard") == []


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_importing_loads_no_torch(module: str):
    code = f"import sys, {module}; print(sorted({TORCH!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "[]\n", done.stderr


def test_files_without_torch_are_type_checked_strictly():
    package = ROOT / "src" / "dockyard"
    strict: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["strict"]
    missing = [
        file.relative_to(ROOT).as_posix()
        for file in sorted(package.rglob("*.py"))
        if not any(imported.name.split(".")[0] in TORCH for imported in imports_of(file, package))
        if not any(is_listed(file.relative_to(ROOT), entry) for entry in strict)
        if part_of(file, package) != "trainer"  # its files hand tensors to each other
    ]
    assert missing == []


def is_listed(file: Path, entry: str) -> bool:
    return file.match(entry) or Path(entry) in file.parents


def write_tree(package: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(source)
    return package


@pytest.mark.parametrize(
    "source",
    [
        "import dockyard.cli",
        "from dockyard.rollout import trial",
        "from dockyard import trainer",
        "from .. import trainer",
        "from ..rollout.trial import run",
        "def late():\n    import dockyard.backends.slime",
        "if TYPE_CHECKING:\n    from dockyard.rl import loss",
        "import dockyard",
        "from dockyard import train",
    ],
)
def test_the_checker_sees_an_arrow_that_points_up(tmp_path: Path, source: str):
    assert len(direction_violations(write_tree(tmp_path, {"gateway/server.py": source}))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from dockyard.engine.protocol import Engine",
        "from dockyard.gateway.matching import SessionHistory",
        "from . import matching",
        "from .matching import SessionHistory",
        "from ..types import Turn",
        "from dockyard import __version__",
        "import dockyards",
    ],
)
def test_the_checker_allows_an_arrow_that_points_down(tmp_path: Path, source: str):
    assert direction_violations(write_tree(tmp_path, {"gateway/server.py": source})) == []


def test_the_checker_allows_types_no_import_of_ours(tmp_path: Path):
    tree = write_tree(tmp_path, {"types.py": "import numpy\nfrom dockyard.errors import DockyardError"})
    assert direction_violations(tree) == ["types.py:2: `types` may not import `dockyard.errors.DockyardError`"]


def test_the_checker_sees_a_part_without_a_place(tmp_path: Path):
    assert direction_violations(write_tree(tmp_path, {"utils.py": ""})) == ["utils.py: `utils` has no place in ORDER"]


def test_the_checker_lets_the_root_import_any_part(tmp_path: Path):
    assert direction_violations(write_tree(tmp_path, {"__init__.py": "from dockyard.trainer.run import train"})) == []


def test_the_checker_sees_torch_outside_its_places(tmp_path: Path):
    files = {
        "gateway/server.py": "def late():\n    from torch import nn",
        "cli.py": "import transformers.utils",
        "trainer/policy.py": "import torch",
        "rl/loss.py": "import torch.nn.functional as F",
        "engine/embedded/engine.py": "import torch",
    }
    assert torch_violations(write_tree(tmp_path, files)) == [
        "cli.py:1: imports `transformers.utils`",
        "gateway/server.py:2: imports `torch.nn`",
    ]


WITHOUT_HARBOR = ("rl", "trainer")
"""Packages whose every module can be imported where Harbor is not installed."""

BLOCK_HARBOR = """
import importlib, sys
from importlib.abc import MetaPathFinder

class NotInstalled(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "harbor" or name.startswith("harbor."):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, NotInstalled())
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:  # torch may be missing here as well
        if error.name.split(".")[0] == "harbor":
            print(module, "needs", error.name)
"""


def modules_of(package: str) -> list[str]:
    """The names of all modules in a package of ours."""
    source = ROOT / "src"
    files = sorted((source / "dockyard" / package).rglob("*.py"))
    return [".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__") for file in files]


def without_harbor(modules: list[str]) -> str:
    """The modules that cannot be imported without Harbor, one a line."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK_HARBOR, *modules], capture_output=True, text=True, timeout=600, check=True
    )
    return done.stdout


@pytest.mark.parametrize("package", WITHOUT_HARBOR)
def test_importing_needs_no_harbor(package: str):
    modules = modules_of(package)
    assert f"dockyard.{package}" in modules
    assert len(modules) > 3
    assert without_harbor(modules) == ""


def test_the_check_sees_a_module_that_needs_harbor():
    assert (
        without_harbor(["dockyard.rl.advantage", "dockyard.rollout.trial"]) == "dockyard.rollout.trial needs harbor\n"
    )
