"""The options that SLiME, Miles and Megatron know, read from their source, since SLiME takes unknown ones in silence.

`python tests/support/slime_flags.py slime=CHECKOUT miles=CHECKOUT megatron=CHECKOUT` writes down their names. SGLang's
parser is in none of them: of its options those count that SLiME's and Miles' scripts and pages use.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PINNED = Path(__file__).parents[1] / "data" / "slime_flags.json"
_PARSERS = {
    "slime": ("slime/utils/arguments.py", "slime/backends/sglang_utils/arguments.py"),
    "miles": ("miles/utils/arguments.py", "miles/backends/sglang_utils/arguments.py"),
    "megatron": ("megatron/training/*.py", "megatron/core/transformer/transformer_config.py"),
}
_MODEL_PARALLEL = "megatron/core/model_parallel_config.py"
_OF_ENGINES = re.compile(r"(?<![\w-])--(?:sglang|router)-[a-z0-9-]+")


def flags_of(name: str, checkout: Path) -> list[str]:
    """Every option of one of them."""
    files = [file for pattern in _PARSERS[name] for file in checkout.glob(pattern)]
    trees = [ast.parse(file.read_text()) for file in files]
    found = {option for tree in trees for option in _added(tree)}
    if name == "megatron":
        trees.append(ast.parse((checkout / _MODEL_PARALLEL).read_text()))
        return sorted(found | {option for tree in trees for option in _of_fields(tree)})
    return sorted(found | set(_used(checkout)))


def _added(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("add_argument", "reset_arg")):
            words = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from (word for word in words if isinstance(word, str) and word.startswith("--"))


def _of_fields(tree: ast.AST) -> Iterator[str]:
    """Megatron makes options of the fields of some classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield f"--{node.target.id.replace('_', '-')}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"--[\w-]+", node.value):
            yield node.value


def _used(checkout: Path) -> Iterator[str]:
    for folder in ("docs", "examples", "scripts"):
        for file in (checkout / folder).rglob("*"):
            if file.suffix in (".sh", ".md", ".py") and file.is_file():
                yield from _OF_ENGINES.findall(file.read_text(errors="ignore"))


if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    PINNED.write_text(json.dumps({name: flags_of(name, Path(path)) for name, path in given.items()}, indent=0) + "\n")
