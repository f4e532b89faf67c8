"""`tools/find-python.sh` on folders of fake Pythons. A fake that works prints its own path, as a real one does."""

import shutil
import subprocess
import sys
from pathlib import Path

FIND_PYTHON = Path(__file__).parents[2] / "tools" / "find-python.sh"


def add_command(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def add_working(path: Path) -> Path:
    return add_command(path, 'echo "$0"')


def add_switched_off(path: Path) -> Path:
    """What pyenv leaves on the PATH for a version that is not active."""
    return add_command(path, 'echo "pyenv: $0: command not found" >&2; exit 127')


def add_real_with(path: Path, change: str) -> Path:
    """This Python, after `change` was done to it; it prints `path` where it would print its own."""
    start = f"import sys; sys.executable = {str(path)!r}; {change}; exec(sys.argv[1])"
    return add_command(path, f'exec "{sys.executable}" -c "{start}" "$2"')


def find_python(path: Path, home: Path, pyenv_root: Path | None = None) -> str:
    for tool in ("sh", "tr"):
        found = shutil.which(tool)
        assert found is not None
        path.mkdir(parents=True, exist_ok=True)
        if not (path / tool).exists():
            (path / tool).symlink_to(found)
    env = {"PATH": str(path), "HOME": str(home)}
    if pyenv_root:
        env["PYENV_ROOT"] = str(pyenv_root)
    done = subprocess.run(["sh", str(FIND_PYTHON)], env=env, capture_output=True, text=True, timeout=600)
    return done.stdout.strip()


def test_the_oldest_supported_python_is_preferred(tmp_path: Path):
    add_working(tmp_path / "bin" / "python3.13")
    expected = add_working(tmp_path / "bin" / "python3.12")
    add_working(tmp_path / "bin" / "python3")
    assert find_python(tmp_path / "bin", tmp_path) == str(expected)


def test_a_pyenv_command_that_is_switched_off_is_passed_over_for_the_version_it_stands_for(tmp_path: Path):
    add_switched_off(tmp_path / "bin" / "python3.12")
    expected = add_working(tmp_path / "home" / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3.12")
    assert find_python(tmp_path / "bin", tmp_path / "home") == str(expected)


def test_pyenv_is_found_by_its_variable_and_in_a_folder_with_a_space(tmp_path: Path):
    root = tmp_path / "py env"
    expected = add_working(root / "versions" / "3.12.9" / "bin" / "python3.12")
    assert find_python(tmp_path / "bin", tmp_path / "home", pyenv_root=root) == str(expected)


def test_a_python_that_is_too_old_is_passed_over_whatever_its_name(tmp_path: Path):
    add_real_with(tmp_path / "bin" / "python3.12", "sys.version_info = (3, 11, 9, 'final', 0)")
    versions = tmp_path / "home" / ".pyenv" / "versions"
    expected = add_real_with(versions / "3.12.1" / "bin" / "python3.12", "sys.version_info = (3, 12, 1, 'final', 0)")
    assert find_python(tmp_path / "bin", tmp_path / "home") == str(expected)


def test_a_python_built_without_its_libraries_is_passed_over(tmp_path: Path):
    add_real_with(tmp_path / "bin" / "python3.12", "sys.modules['lzma'] = None")
    expected = add_working(tmp_path / "home" / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3.12")
    assert find_python(tmp_path / "bin", tmp_path / "home") == str(expected)


def test_a_release_candidate_is_passed_over(tmp_path: Path):
    add_real_with(tmp_path / "bin" / "python3.12", "sys.version_info = (3, 12, 0, 'candidate', 1)")
    expected = add_working(tmp_path / "home" / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3.12")
    assert find_python(tmp_path / "bin", tmp_path / "home") == str(expected)


def test_a_real_python_is_found(tmp_path: Path):
    real = tmp_path / "pyenv" / "versions" / "this" / "bin" / "python3.12"
    real.parent.mkdir(parents=True)
    real.symlink_to(sys.executable)
    assert find_python(tmp_path / "bin", tmp_path, pyenv_root=tmp_path / "pyenv") == str(real)
