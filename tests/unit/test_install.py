"""`tools/install.sh` with the real uv, on a project whose packages are small fakes in indexes that are folders."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv") or next(iter(map(str, ROOT.glob(".tools/uv/bin/uv"))), None)
GPU = [path for path in ("/proc/driver/nvidia", "/dev/nvidia0", "/dev/nvidiactl") if Path(path).exists()]
NO_ANSWER = "http://127.0.0.1:9/simple"
PROJECT = """
[project]
name = "dockyard"
version = "0.1.0"
requires-python = ">=3.12"
[project.optional-dependencies]
demo = ["torch==2.15.0"]
swebench = []
modal = []
[dependency-groups]
dev = []
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import shutil
def get_requires_for_build_editable(settings=None): return []
def build_editable(folder, settings=None, metadata=None):
    return shutil.copy("dockyard-0.1.0-py3-none-any.whl", folder).rpartition("/")[2]
build_wheel = lambda folder, settings=None, metadata=None: build_editable(folder)
"""
pytestmark = [
    pytest.mark.skipif(UV is None, reason="no uv here: `sh tools/find-uv.sh` installs one"),
    pytest.mark.skipif(bool(GPU), reason="this machine has a GPU"),
]


def write_wheel(folder: Path, name: str, version: str, *, needs: tuple[str, ...] = (), code: str = "") -> Path:
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{module}/__init__.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in files.items()]
    files[f"{info}/RECORD"] = "".join(lines) + f"{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def add(index: Path, name: str, version: str, *, needs: tuple[str, ...] = (), code: str = "") -> None:
    """One package to an index."""
    wheel = write_wheel(index / name, name, version, needs=needs, code=code)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (index / name / "index.html").write_text(f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>')


class Checkout:
    """A folder with our tools, a lock file and an index for CPUs."""

    def __init__(self, folder: Path, *, torch_imports: str) -> None:
        self.folder, self.cpu_index, pypi = folder / "project", folder / "cpu", folder / "pypi"
        cuda = ("nvidia-cublas", "nvidia-cusolver", "triton")
        for name in cuda:
            add(pypi, name, "1.0")
        add(pypi, "torch", "2.15.0", needs=cuda, code=torch_imports)
        add(self.cpu_index, "torch", "2.15.0+cpu")
        shutil.copytree(ROOT / "tools", self.folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        (self.folder / "pyproject.toml").write_text(PROJECT)
        (self.folder / "backend.py").write_text(BACKEND)
        write_wheel(self.folder, "dockyard", "0.1.0")
        (folder / "bin").mkdir()
        self.mirror = pypi.as_uri()
        self._env = {
            "PATH": f"{folder / 'bin'}:{Path(UV or '').parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "UV_CACHE_DIR": str(folder / "uv-cache"),
            "UV_PYTHON": sys.executable,
            "UV_NO_CONFIG": "1",
            "PIP_CONFIG_FILE": os.devnull,
        }
        self._run([UV or "", "lock", "--quiet", "--default-index", self.mirror])

    def add_gpu(self) -> None:
        program = self.folder.parent / "bin" / "nvidia-smi"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)

    def install(self, index: str, **settings: str) -> str:
        return self._run(["sh", "tools/install.sh", "demo"], DOCKYARD_TORCH_INDEX=index, **settings)

    @property
    def installed(self) -> dict[str, str]:
        found = (self.folder / ".venv").glob("lib/python3*/site-packages/*.dist-info")
        pairs = (path.name.removesuffix(".dist-info").split("-") for path in found)
        return {name: version for name, version in pairs if name not in ("dockyard", "pip")}

    def _run(self, command: list[str], **settings: str) -> str:
        env = {name: value for name, value in (self._env | settings).items() if value}
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path, torch_imports="import nvidia_cublas")


@pytest.mark.parametrize("from_mirror", [False, True])
def test_a_machine_without_a_gpu_gets_the_cpu_build_and_keeps_it(checkout: Checkout, from_mirror: bool):
    settings = {"UV_DEFAULT_INDEX": checkout.mirror} if from_mirror else {}
    said = checkout.install(checkout.cpu_index.as_uri(), **settings)
    assert checkout.installed == {"torch": "2.15.0+cpu"}
    assert "no GPU here, so its CPU build" in said
    assert checkout.install(checkout.cpu_index.as_uri(), **settings) == "dependencies: up to date\n"


@pytest.mark.parametrize("from_mirror", [False, True])
def test_where_no_index_has_a_cpu_build_the_locked_one_comes_without_what_it_does_not_need(
    checkout: Checkout, from_mirror: bool
):
    settings = {"UV_DEFAULT_INDEX": checkout.mirror} if from_mirror else {}
    said = checkout.install(NO_ANSWER, **settings)
    assert checkout.installed == {"torch": "2.15.0", "nvidia_cublas": "1.0"}
    assert "does not answer" in said
    assert checkout.install(NO_ANSWER, **settings) == "dependencies: up to date\n"


def test_a_torch_that_does_not_start_without_them_gets_all_libraries(tmp_path: Path):
    checkout = Checkout(tmp_path, torch_imports="import triton")
    checkout.install(NO_ANSWER)
    assert checkout.installed == {"torch": "2.15.0", "nvidia_cublas": "1.0", "nvidia_cusolver": "1.0", "triton": "1.0"}


def test_a_machine_with_a_gpu_gets_what_the_lock_file_says_also_in_place_of_a_cpu_build(checkout: Checkout):
    everything = {"torch": "2.15.0", "nvidia_cublas": "1.0", "nvidia_cusolver": "1.0", "triton": "1.0"}
    checkout.install(checkout.cpu_index.as_uri())
    checkout.add_gpu()
    checkout.install(checkout.cpu_index.as_uri())
    assert checkout.installed == everything
    assert checkout.install(checkout.cpu_index.as_uri()) == "dependencies: up to date\n"


def test_the_locked_build_can_be_asked_for(checkout: Checkout):
    checkout.install("locked")
    assert set(checkout.installed) == {"torch", "nvidia_cublas", "nvidia_cusolver", "triton"}


def test_what_is_installed_later_leaves_the_build_of_torch_and_the_python_as_they_are(checkout: Checkout):
    checkout.install(NO_ANSWER)
    before = checkout.installed
    [own] = (checkout.folder / ".venv").glob("lib/python3*/site-packages/dockyard-*.dist-info")
    shutil.rmtree(own)
    said = checkout.install(NO_ANSWER, UV_PYTHON="", UV_PYTHON_DOWNLOADS="never", PYENV_ROOT="")
    assert "up to date" not in said
    assert "torch:" not in said
    assert checkout.installed == before
