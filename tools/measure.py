"""Prints the size and shape of a source tree, one figure per line.

    python tools/measure.py           # of src/
    python tools/measure.py DIR       # of another tree; DIR is what its imports are relative to
    python tools/measure.py --path    # of src/, and the modules that one training step passes; needs the extra `train`

The path is measured, not derived from imports: one step of `dockyard train` runs on one task with a tiny model, and
the modules are counted in which a function is entered between reading the task's folder and the end of the first update
of the weights. Modules that run in child processes only, such as the sandbox's server, are not counted.
"""

import argparse
import ast
import inspect
import io
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import CodeType

ROOT = Path(__file__).resolve().parents[1]
type Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A Python file and its syntax tree."""

    name: str
    """As it is imported."""
    path: Path
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    def nodes[T: ast.AST](self, *kinds: type[T]) -> Iterator[T]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def functions(self) -> Iterator[Function]:
        return self.nodes(ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Figures:
    """What is printed of a tree."""

    num_files: int
    num_lines: int
    function_median: float
    function_p99: int
    function_max: int
    largest_file: str
    prose_share: float
    """Lines of docstrings and of comments that have a line of their own."""
    one_importer: list[str]
    """Modules that exactly one other module of the tree imports."""
    repeated_classes: dict[str, int]
    """Public class names that are defined more than once, with their number of definitions."""
    num_private: int
    num_private_once: int
    """Private functions and methods that their own module refers to exactly once."""

    def __str__(self) -> str:
        lengths = f"{self.function_median:g} / {self.function_p99} / {self.function_max}"
        repeated = ", ".join(f"{name} ×{count}" for name, count in self.repeated_classes.items())
        rows = {
            "files / lines": f"{self.num_files} / {self.num_lines:,}",
            "function lines: median / p99 / max": lengths,
            "largest file": self.largest_file,
            "docstring and comment lines": f"{self.prose_share:.0%}",
            "modules with exactly one importer": str(len(self.one_importer)),
            "public class names defined more than once": f"{len(self.repeated_classes)}: {repeated or '-'}",
            "private functions called once": f"{self.num_private_once} of {self.num_private}",
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def measure(folder: Path) -> Figures:
    """Read every Python file under the folder."""
    modules = read_modules(folder)
    lengths = sorted(function_length(function) for module in modules for function in module.functions())
    largest = max(modules, key=lambda module: module.num_lines)
    num_lines = sum(module.num_lines for module in modules)
    references = [count for module in modules for count in private_references(module)]
    return Figures(
        num_files=len(modules),
        num_lines=num_lines,
        function_median=median(lengths) if lengths else 0,
        function_p99=lengths[int(len(lengths) * 0.99)] if lengths else 0,
        function_max=lengths[-1] if lengths else 0,
        largest_file=f"{largest.num_lines} ({largest.path.relative_to(folder)})",
        prose_share=sum(len(prose_lines(module)) for module in modules) / max(num_lines, 1),
        one_importer=modules_with_one_importer(modules),
        repeated_classes=repeated_classes(modules),
        num_private=len(references),
        num_private_once=references.count(1),
    )


def read_modules(folder: Path) -> list[Module]:
    """Return the Python files under the folder, sorted by path."""
    files = sorted(folder.rglob("*.py"))
    if not files:
        sys.exit(f"error: `{folder}` has no Python files\nhint: `python tools/measure.py --help`")
    return [_read(file, folder) for file in files]


def _read(file: Path, folder: Path) -> Module:
    text = file.read_text(encoding="utf-8")
    parts = file.relative_to(folder).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, file, text, ast.parse(text))


def function_length(function: Function) -> int:
    """Return the number of lines from `def` to the last statement."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def prose_lines(module: Module) -> set[int]:
    """Return the numbers of the lines with docstrings (of fields as well) and whole-line comments."""
    lines: set[int] = set()
    for node in module.nodes(ast.Expr):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            lines.add(token.start[0])
    return lines


def modules_with_one_importer(modules: Sequence[Module]) -> list[str]:
    """Return the modules, packages excepted, that exactly one other module imports, also inside functions."""
    known = {module.name for module in modules}
    packages = {module.name for module in modules if module.path.name == "__init__.py"}
    importers = Counter(name for module in modules for name in imported_modules(module, known) - {module.name})
    return sorted(name for name, count in importers.items() if count == 1 and name not in packages)


def imported_modules(module: Module, known: set[str]) -> set[str]:
    """Return the modules of the tree that this one imports. In `from a.b import c`, `c` may be a module."""
    found: set[str] = set()
    for node in module.nodes(ast.Import):
        found.update(alias.name for alias in node.names)
    for node in module.nodes(ast.ImportFrom):
        start = _absolute(node, module)
        names = {f"{start}.{alias.name}" for alias in node.names}
        found.update(names & known or {start})
    return found & known


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    is_package = module.path.name == "__init__.py"
    parts = module.name.split(".")
    above = parts[: len(parts) - node.level + is_package]
    return ".".join([*above, *([node.module] if node.module else [])])


def repeated_classes(modules: Sequence[Module]) -> dict[str, int]:
    """Return the public class names with several definitions, the most frequent first."""
    counts = Counter(node.name for module in modules for node in module.nodes(ast.ClassDef) if node.name[0] != "_")
    return {name: count for name, count in counts.most_common() if count > 1}


def private_references(module: Module) -> list[int]:
    """Return, for each private function or method, how often its name is used in its own module."""
    names = {node.name for node in module.functions() if node.name[0] == "_" and not node.name.endswith("__")}
    used = Counter(node.id for node in module.nodes(ast.Name))
    used += Counter(node.attr for node in module.nodes(ast.Attribute))
    return [used[name] for name in names]


@dataclass
class PathTracer:
    """Records the files of a package in which functions are entered between two functions of it."""

    package: Path
    first: tuple[str, str]
    """File, relative to the package, and name of the function whose first call starts the recording."""
    last: tuple[str, str]
    """The function whose first return ends it."""

    def __post_init__(self) -> None:
        self.files: set[str] = set()
        self.is_open = self.is_over = False

    def __enter__(self) -> "PathTracer":
        self._monitoring = sys.monitoring
        self._tool = self._monitoring.PROFILER_ID
        self._monitoring.use_tool_id(self._tool, "measure")
        events = self._monitoring.events
        self._monitoring.register_callback(self._tool, events.PY_START, self._start)
        self._monitoring.register_callback(self._tool, events.PY_RETURN, self._return)
        self._monitoring.set_events(self._tool, events.PY_START)
        return self

    def __exit__(self, *_: object) -> None:
        self._monitoring.set_events(self._tool, 0)
        self._monitoring.free_tool_id(self._tool)

    def _place(self, code: CodeType) -> tuple[str, str] | None:
        """Return None for code outside the package, and for bodies of modules and classes."""
        path = Path(code.co_filename)
        if not code.co_flags & inspect.CO_OPTIMIZED or not path.is_relative_to(self.package):
            return None
        return path.relative_to(self.package).as_posix(), code.co_name

    def _start(self, code: CodeType, _offset: int) -> object:
        place = self._place(code)
        if place is None or self.is_over:
            return sys.monitoring.DISABLE
        self.is_open = self.is_open or place == self.first
        if not self.is_open:
            return None  # it may be entered again later
        self.files.add(place[0])
        if place == self.last:
            sys.monitoring.set_local_events(self._tool, code, sys.monitoring.events.PY_RETURN)
        return sys.monitoring.DISABLE

    def _return(self, _code: CodeType, _offset: int, _value: object) -> None:
        self.is_over = True


_TASK = {
    "task.toml": 'schema_version = "1.4"\n',
    "instruction.md": "Write a word to out.txt with echo.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
    "tests/test.sh": '#!/bin/bash\nprintf "0.%05d" $RANDOM > /logs/verifier/reward.txt\n',  # rewards must differ
}
_RUN = """\
run_dir = "{folder}/run"
steps = 1
[model]
name = "{model}"
device = "cpu"
[tasks]
train = "{folder}/task"
[agent]
max_turns = 1
[sampling]
max_new_tokens = 8
[grpo]
group_size = 2
tasks_per_step = 1
"""


def measure_path() -> list[str]:
    """Train one step on one task with a tiny model; return the modules it passes."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "support")]
    from tiny_policy import tiny_model_dir

    from dockyard.cli import main as dockyard

    package = ROOT / "src" / "dockyard"
    tracer = PathTracer(package, ("tasks/folder.py", "load_tasks"), ("trainer/policy.py", "update"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, text in _TASK.items():
            file = folder / "task" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (folder / "run.toml").write_text(_RUN.format(folder=folder, model=tiny_model_dir()))
        with tracer:
            code = dockyard(["train", str(folder / "run.toml")])
    if code or not tracer.is_over:
        sys.exit("error: the training step did not reach its update\nhint: its messages are above")
    return sorted(tracer.files)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Prints the size and shape of a source tree, one figure per line.")
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", default=ROOT / "src")
    parser.add_argument("--path", action="store_true", help="also count the modules that one training step passes")
    arguments = parser.parse_args(argv)
    print(measure(arguments.folder))
    if arguments.path:
        passed = measure_path()
        print(f"modules from a task folder to a changed weight: {len(passed)}", *passed, sep="\n  ")


if __name__ == "__main__":
    main()
