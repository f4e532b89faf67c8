"""Removes files of the agent that could influence a test run. Runs in the task's container, on Python 3.7 or newer.

The tested code runs in the tests' process; everything else there must come from the repository or the image.
Usage: clean.py REPLACED KEPT, in the repository
"""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import sys

CONFIGS = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"),
    *("tox.ini", "setup.cfg", "pyproject.toml"),
)
"""Files that pytest reads besides tests."""
_SHADOWS = ("pytest", "_pytest", "pluggy", "unittest", "sitecustomize", "usercustomize", "dockyard_report", "__init__")
"""Modules that may not exist next to tests, whether they are installed or not."""
_APART = (".git", "site-packages", "node_modules")
_METADATA = (".dist-info", ".egg-info")
_SUFFIXES = tuple(importlib.machinery.all_suffixes())


def main(replaced: str, kept: str) -> None:
    """Remove the files and print each of them."""
    restored, ours = _lines(replaced), frozenset(_lines(kept))
    found = [*_configs(), *_plugins()]
    found += [path for place in restored for path in _twins(place)]
    found += [path for folder in sorted({_root_of(place) for place in ["x", *restored]}) for path in _shadows(folder)]
    for path in dict.fromkeys(found):
        if path not in ours and os.path.lexists(path):
            sys.stdout.write(f"removed {path}: it is not part of the repository\n")
            _remove(path)


def _configs() -> list[str]:
    return [path for path in _walk() if os.path.basename(path) in CONFIGS]


def _plugins() -> list[str]:
    """Find package metadata that names pytest plugins, which pytest would load."""
    inside = [path for path in _walk() if path.lower().endswith(_METADATA)]
    return [path for path in inside if "pytest11" in _text(os.path.join(path, "entry_points.txt"))]


def _twins(place: str) -> list[str]:
    """Find packages and extensions that would be imported instead of a test module."""
    folder, name = os.path.split(place)
    modules = (path for path in _modules(folder) if _name(path) == _name(name))
    return [path for path in modules if os.path.basename(path) != name]


def _shadows(folder: str) -> list[str]:
    """Find modules that would be imported instead of an installed one."""
    return [path for path in _modules(folder) if _name(path) in _SHADOWS or _is_installed(_name(path))]


def _root_of(place: str) -> str:
    """The folder from which pytest imports a test."""
    folder = os.path.dirname(place)
    while folder and os.path.exists(os.path.join(folder, "__init__.py")):
        folder = os.path.dirname(folder)
    return folder


def _modules(folder: str) -> list[str]:
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    return [path for path in (os.path.join(folder, name) for name in names) if _is_module(path)]


def _is_module(path: str) -> bool:
    if os.path.isdir(path):
        return any(name.startswith("__init__.") for name in os.listdir(path))
    return path.endswith(_SUFFIXES)


def _is_installed(name: str) -> bool:
    here = os.path.join(os.getcwd(), "")
    outside = [path for path in sys.path if not os.path.join(os.path.realpath(path), "").startswith(here)]
    found = importlib.machinery.PathFinder.find_spec(name, outside)
    return found is not None and found.origin is not None


def _walk() -> list[str]:
    paths: list[str] = []
    for folder, folders, files in os.walk("."):
        folders[:] = [name for name in folders if name not in _APART]
        paths += [os.path.normpath(os.path.join(folder, name)) for name in [*folders, *files]]
    return paths


def _name(path: str) -> str:
    return os.path.basename(path).partition(".")[0]


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


def _text(path: str) -> str:
    if not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _lines(path: str) -> list[str]:
    return _text(path).splitlines()


if __name__ == "__main__":
    main(*sys.argv[1:])
