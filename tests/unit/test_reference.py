"""docs/reference is what tools/reference.py writes."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ("api.md", "settings.md", "cli.md")


def test_the_reference_is_current():
    """If this fails, run `python tools/reference.py` and commit docs/reference."""
    command = [sys.executable, str(ROOT / "tools/reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (
        f"{done.stdout}{done.stderr}\nrun `python tools/reference.py`, then commit docs/reference"
    )


def test_the_reference_names_every_setting_function_and_command():
    from dockyard import __all__ as names
    from dockyard.config import RunConfig
    from dockyard.settings.text import settings_by_key

    api, settings, cli = ((ROOT / "docs/reference" / name).read_text() for name in FILES)
    assert [key for key in settings_by_key(RunConfig) if f"--{key} " not in settings] == []
    assert [name for name in names if name != "__version__" and f"## dockyard.{name}\n" not in api] == []
    assert all(f"## dockyard {verb}\n" in cli for verb in ("train", "rollout", "eval", "convert", "tasks check"))
