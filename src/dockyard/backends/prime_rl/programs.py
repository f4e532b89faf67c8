"""Where Prime-RL's `rl` is. It starts further programs by their names, so their folder must be on the PATH."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from dockyard.backends.prime_rl.toml import PLUGIN
from dockyard.errors import DockyardError

_INSTALL = "`docs/guides/prime-rl.md` says how Prime-RL and this package are installed together"
_IMPORT_TIMEOUT_S = 300


def find_rl(checkout: Path | None) -> Path | None:
    """In the checkout's environment; without one on the PATH, beside this Python, or in `./prime-rl`."""
    if checkout:
        return checkout / ".venv" / "bin" / "rl"
    on_path = shutil.which("rl")
    others = (Path(sys.executable).parent, Path("prime-rl", ".venv", "bin").absolute())
    places = [*([Path(on_path)] if on_path else []), *(folder / "rl" for folder in others)]
    return next((rl for rl in places if rl.is_file()), None)


def environment_of(rl: Path | None) -> Mapping[str, str]:
    """What `rl` needs to find the others."""
    return {"PATH": f"{rl.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"} if rl else {}


def check_installed(rl: Path | None) -> None:
    """It is there, and its Python has our plug-in, without which it cannot even read its settings."""
    if rl is None or not rl.is_file():
        where = f"`{rl}` does not exist" if rl else "there is no `rl` on the PATH, nor in `./prime-rl/.venv`"
        raise DockyardError(f"Prime-RL is not installed: {where}", hint=_INSTALL)
    python = rl.parent / "python"
    try:
        done = subprocess.run(
            [str(python), "-c", f"import {PLUGIN}"],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise DockyardError(f"`{python}` cannot be started: {error.strerror}", hint=_INSTALL) from None
    except subprocess.TimeoutExpired:
        return  # a slow disk; `rl` itself has the time
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it gives no reason"])[-1]
        raise DockyardError(f"`{python}` cannot import the plug-in `{PLUGIN}`: {said}", hint=_INSTALL)
